"""Course machinery. Tensors in plain Python, for pages: what `small_torch` offers as torch."""
