"""Lesson 13. A router's estimate of a replica's cache: the latest blocks sent to it, corrected by its reports.

A block's key stands for its tokens and all tokens before it (lesson 12), so the longest known prefix is found by
looking up keys one after another. SGLang's router keeps a radix tree of characters for this; llm-d's keeps keys.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence


class SeenBlocks:
    """The keys of one replica's latest `capacity` blocks, approximately: the replica itself decides what it evicts.

    keys: each known block's key, with the key of the block before it (None if it is a prompt's first); the least
    recently used first. behind: for each key, the known blocks that directly follow it.

    Raises:
        ValueError: `capacity` is below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a replica holds at least 1 block")
        self.capacity = capacity
        self.keys: OrderedDict[Hashable, Hashable] = OrderedDict()
        self.behind: defaultdict[Hashable, set[Hashable]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self.keys)

    def matched(self, keys: Sequence[Hashable]) -> int:
        """Return the length in blocks of the longest prefix of a prompt that the replica is believed to have."""
        return next((index for index, key in enumerate(keys) if key not in self.keys), len(keys))

    def add(self, keys: Sequence[Hashable]) -> None:
        """Note that the replica was sent a prompt of these blocks, and forget the oldest ones beyond `capacity`.

        They become the most recently used, each block more recent than the blocks after it: those cannot be found
        without it, so it must be forgotten last.
        """
        for key, before in reversed(list(zip(keys, [None, *keys], strict=False))):
            self.keys[key] = before
            self.keys.move_to_end(key)
            self.behind[before].add(key)
        while len(self.keys) > self.capacity:
            self._drop(next(iter(self.keys)))

    def correct(self, keys: Sequence[Hashable], num_found: int) -> None:
        """Note that the replica found only the first `num_found` blocks of a prompt in its cache.

        It evicts the end of a prefix before its beginning. So the first block that it did not find is forgotten with
        all blocks after it, of any prompt. A prompt's last block proves nothing: it is always computed.
        """
        lost = [key for key in keys[num_found:-1] if key in self.keys][:1]
        while lost:
            key = lost.pop()
            lost += self.behind[key]
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        """Forget one block."""
        before = self.keys.pop(key)
        self.behind[before].discard(key)
        if not self.behind[key]:
            del self.behind[key]
        if not self.behind[before]:
            del self.behind[before]
