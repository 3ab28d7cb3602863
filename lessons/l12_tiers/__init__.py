"""Lesson 12. Its page, its tasks, and compaction."""
