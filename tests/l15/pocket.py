"""Lesson 15. Shared by the tests: where pocket-windows lies."""

from mini_engine.checkpoint.shipped import shipped_checkpoint


def directory():
    """Return the checkpoint's directory."""
    return shipped_checkpoint("pocket-windows")
