"""Lesson 0. The base class of stores: attention asks a store to write K and V (`set_kv`), and then to attend."""

from typing import Any


class Store:
    """A store of K and V. direct: True if layers may also write and read its tensors themselves."""

    direct = False

    @property
    def direct_step(self) -> Any:
        """In a step (`in_step`): what layers that write and read a direct store themselves share in it, or None."""
        return None

    def in_step(self, meta: Any) -> Any:
        """Return the store for the layers of a step with this plan: what they share is made once. Here, itself."""
        return self
