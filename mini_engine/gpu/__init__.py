"""Lesson 10. For a GPU: decode steps that are replayed instead of launched, and one copy to the device for each."""
