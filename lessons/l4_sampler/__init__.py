"""Lesson 4. Its page, its tasks, and a row without a request."""
