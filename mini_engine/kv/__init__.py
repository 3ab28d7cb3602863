"""Lesson 0. Where K and V are kept: one module for each stage of the course."""
