"""Course machinery. The parts of scripts/bench.py: a module for each suite, and modules that suites share."""
