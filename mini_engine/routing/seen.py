"""Lesson 13. What a router believes a replica has computed: the keys of the blocks it was sent, the oldest forgotten.

A block's key stands for its tokens and all tokens before it (lesson 12), so the longest known prefix is found by
looking keys up one after another, without a tree. SGLang's router keeps a tree of characters instead; llm-d's keeps
keys, as here.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class SeenBlocks:
    """The keys of one replica's latest `capacity` blocks, approximately: the replica itself decides what it evicts.

    Raises:
        ValueError: `capacity` is below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a replica holds at least 1 block")
        self.capacity = capacity
        self.keys: OrderedDict[Hashable, None] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self.keys)

    def matched(self, keys: Sequence[Hashable]) -> int:
        """Return how many blocks of a prompt, from its start, the replica has seen."""
        return next((index for index, key in enumerate(keys) if key not in self.keys), len(keys))

    def add(self, keys: Sequence[Hashable]) -> None:
        """Note that the replica was sent a prompt of these blocks.

        The first block counts as the most recently used: without it, those behind it cannot be found.
        """
        for key in reversed(keys):
            self.keys[key] = None
            self.keys.move_to_end(key)
        while len(self.keys) > self.capacity:
            self.keys.popitem(last=False)

    def correct(self, keys: Sequence[Hashable], num_found: int) -> None:
        """Note that of a prompt that was believed to be there the replica found only `num_found` blocks.

        Call it before `add`: what the replica has computed since is there again.
        """
        for key in keys[num_found:]:
            self.keys.pop(key, None)
