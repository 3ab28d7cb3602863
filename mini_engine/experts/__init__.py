"""Course machinery. Mixtures of experts: a router sends each token to a few of a layer's feed-forward blocks."""
