"""Course machinery. The lessons, and the commands that a student works with: `python -m lessons`."""
