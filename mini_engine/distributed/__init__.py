"""Lesson 13. More than one machine: routing, replicas, and one model in several processes."""
