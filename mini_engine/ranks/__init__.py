"""Lesson 18. One model over several processes: each has its share of the heads, and of the K and V."""
