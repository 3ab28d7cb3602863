"""Lesson 17. Compressed K and V: a pool of int8 rows that carry their scale, and the kernels that read them."""
