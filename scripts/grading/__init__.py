"""Course machinery. Turns checks of students' submissions into points, for people and for programs."""
