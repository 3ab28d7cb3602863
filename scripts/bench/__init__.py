"""Course machinery. What scripts/bench.py is made of: a module for each suite, and what the suites share."""
