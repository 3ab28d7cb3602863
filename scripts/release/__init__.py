"""Course machinery. Checks before a release."""
