"""Lesson 0. What turns a model and a store into generated tokens."""
