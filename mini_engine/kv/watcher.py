"""Lesson 8. The seam for those who must know which prefixes are cached: told of blocks that come and go, in order."""

from collections.abc import Sequence

from mini_engine.kv.prefixes import Stored


class CacheWatcher:
    """Told what a prefix cache stores and evicts; here nobody is. Lesson 20 publishes it."""

    def stored(self, stored: Stored) -> None:
        """Note that the tree has all of these blocks, the new ones from index `start` on."""

    def removed(self, blocks: Sequence[int]) -> None:
        """Note that these blocks leave the tree, the end of a text first."""

    def cleared(self) -> None:
        """Note that all blocks have left the tree at once."""

    def close(self) -> None:
        """Release what is held outside the pool. Idempotent."""


NO_WATCHER = CacheWatcher()
