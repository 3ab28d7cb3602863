"""Lesson 10. For a GPU: tables that stay on the device, and decode steps that are replayed instead of launched."""
