"""Course machinery. Turns checks of what students hand in into points, for people and for programs."""
