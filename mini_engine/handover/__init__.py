"""Lesson 19. Hand-over: a process computes prompts, and hands their K and V to the process that answers."""
