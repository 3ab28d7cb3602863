"""Lesson 11. States in lesson 10's decode loop."""
