"""Lesson 14. Speculation from the text itself: guess several tokens and verify all of them in one step."""
