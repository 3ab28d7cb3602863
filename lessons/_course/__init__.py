"""Course machinery. The implementation of `python -m lessons`. The lessons are in the neighbouring folders."""
