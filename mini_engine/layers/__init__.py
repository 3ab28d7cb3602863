"""Lesson 9. Fast layers for a loaded model on a CPU: packed weights, and fused operations between them."""

from mini_engine.layers.fast_model import speed_up

__all__ = ["speed_up"]
