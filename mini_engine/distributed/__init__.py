"""Lesson 13. More than one machine: routing and replicas."""
