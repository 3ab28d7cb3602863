"""Course machinery. The parts of scripts/setup_env.py. An old Python must be able to parse them."""
