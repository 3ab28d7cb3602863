"""Lesson 13. Its page, its tasks, and simulated replicas."""
