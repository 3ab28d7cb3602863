"""Lesson 10. What a GPU wants: tables that stay on the device, and decode steps replayed instead of launched anew."""
