"""Lesson 20. A cache that waits for a tool: eviction policies that know sessions, and events of the cache."""
