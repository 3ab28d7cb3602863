"""Lesson 3. Its page, its tasks, and a loop over packed steps."""
