"""Lesson 18. Its page, its tasks, and a sum in shared memory, step by step."""
