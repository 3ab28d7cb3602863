"""Lesson 15. Layers with a window: attention that sees only the last W keys, and memory that keeps only those."""
