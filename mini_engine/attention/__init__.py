"""Lesson 0. Attention: dense for one sequence, and from lesson 3 on paged, by one of several kernels."""
