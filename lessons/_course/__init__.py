"""Course machinery. What is behind `python -m lessons`; the lessons themselves are in the folders beside this one."""
