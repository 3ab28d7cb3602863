"""Lesson 13. Chooses the replica that answers a prompt."""
