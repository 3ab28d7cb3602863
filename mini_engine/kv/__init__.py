"""Lesson 0. Stores of K and V: one module for each stage of the course."""
