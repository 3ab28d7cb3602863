"""Course machinery. What scripts/setup_env.py is made of; an old Python must be able to read it."""
