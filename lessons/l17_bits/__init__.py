"""Lesson 17. Its page, its tasks, and the judge of compressed K and V."""
