"""Lesson 16. Latents: one small vector holds the keys and values of all heads, and is all that the cache keeps."""
