"""Lesson 13. Which of several replicas answers a prompt."""
