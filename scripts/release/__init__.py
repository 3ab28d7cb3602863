"""Course machinery. What a release needs to know."""
