"""Course machinery. Puts an engine together: options, the layout of its memories, and the parts that they choose."""
