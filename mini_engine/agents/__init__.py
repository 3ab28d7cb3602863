"""Lesson 20. A cache that waits for a tool: eviction policies that know sessions, and who is told what is cached."""
