"""Lesson 11. Hybrid models: most layers keep a state of fixed size instead of K and V."""
