"""Lesson 20. Its page, and a simulation: loads of agents, a replay through the real prefix cache, and an oracle."""
