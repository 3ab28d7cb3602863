"""Lesson 0. Turns a model and a store into generated tokens."""
