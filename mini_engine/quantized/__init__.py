"""Lesson 17. Compressed K and V: pools of int8 and int4 rows that carry their scales, and kernels that read them."""
