"""Lesson 8. A seam that reports which blocks a prefix cache stores and evicts, in order."""

from collections.abc import Sequence

from mini_engine.kv.prefixes import Stored


class CacheWatcher:
    """A watcher that ignores its reports. Lesson 20 publishes them."""

    def stored(self, stored: Stored) -> None:
        """Note that the tree has all of these blocks, the new ones from index `start` on."""

    def removed(self, blocks: Sequence[int]) -> None:
        """Note that these blocks leave the tree, the end of a text first."""

    def cleared(self) -> None:
        """Note that all blocks have left the tree at once."""

    def close(self) -> None:
        """Release what is held outside the pool. Idempotent."""


NO_WATCHER = CacheWatcher()
