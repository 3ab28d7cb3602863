"""Course machinery. What measures the pocket models: held-out lines, margins, evaluation."""
