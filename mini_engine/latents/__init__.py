"""Lesson 16. Latents: keys and values of all heads from one small vector, which is all that the cache holds."""
