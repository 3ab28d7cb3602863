"""Lesson 0. The command line: one way to tell mistakes, and from lesson 6 on the engine's own commands."""
