"""Lesson 0. The Qwen3 model, written once for every lesson."""
