"""Lesson 12. Tiers of memory behind the pool: what falls out of it is kept in host memory and on disk."""
