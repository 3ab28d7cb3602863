"""Lesson 0. The base class of stores: attention asks a store to write K and V (`set_kv`), and then to attend."""


class Store:
    """A store of K and V. direct: True if layers may also write and read its tensors themselves."""

    direct = False
