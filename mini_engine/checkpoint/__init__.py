"""Lesson 0. Reads a checkpoint directory: configuration and weights."""
