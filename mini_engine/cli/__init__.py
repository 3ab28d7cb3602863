"""Lesson 0. Command lines: one-line errors for every script and, from lesson 6 on, the engine's own commands."""
