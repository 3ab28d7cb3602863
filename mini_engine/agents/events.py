"""Lesson 20. Events of a prefix cache: which blocks it stores and evicts, in order, named by their text.

A block's id means nothing to others, so events carry a hash: the last 8 bytes of a key, which is a digest of the key
before it and of the block's tokens. A router (lesson 13) computes the same keys from a prompt. After all events, a
subscriber has exactly the blocks of the tree.
"""

import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from mini_engine.distributed.routing.keys import block_keys
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.radix_node import TOKEN_BYTES
from mini_engine.kv.watcher import CacheWatcher
from mini_engine.tiers.keys import chain

HASH_BYTES = 8
MOST_EVENTS = 10_000


@dataclass(frozen=True)
class BlockStored:
    """Blocks that can be found from now on, one behind the other.

    parent_block_hash: of the block before them; None if they begin a text. token_ids: of all of them, in order.
    """

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks that can no longer be found."""

    block_hashes: Sequence[int]


@dataclass(frozen=True)
class AllBlocksCleared:
    """No block can be found any more, whatever was stored before."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(NamedTuple):
    """Events of a replica in order, published together.

    ts: seconds since 1970. data_parallel_rank: which of several engines, if they share a name. publisher_id: a new one
    for each start of the replica; None if it does not say.
    """

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int | None = None
    publisher_id: bytes | None = None


class Published(NamedTuple):
    """A block of the tree, as subscribers know it. parent: the key of the block before it. tokens: 4 bytes each."""

    key: bytes
    parent: bytes | None
    tokens: bytes


def short_hash(key: bytes) -> int:
    """Return the hash of a block in events, from its key: the last 8 bytes, big-endian.

    As vLLM's by default: a key of 32 bytes would be longer, and some subscribers read integers only. Two keys with the
    same hash would cost a router a detour, and never a wrong token: the engine itself compares tokens.
    """
    return int.from_bytes(key[-HASH_BYTES:], "big")


class EventLog(CacheWatcher):
    """Turns what a watcher is told into events, which wait until `take`. Thread-safe.

    Args:
        block_size: tokens in a block. limit: the most events that wait.

    If more come, they are dropped, and the next `take` returns a snapshot: AllBlocksCleared, then every block of the
    tree. So the log needs little memory however rarely it is read, and a subscriber still ends up with the same blocks.

    blocks: the blocks of the tree by their id, each later than the block before it. Left out are those of namespaces
    that cannot be part of a key: no other request finds these blocks. num_dropped: events so far that were dropped.
    """

    def __init__(self, block_size: int, limit: int = MOST_EVENTS) -> None:
        self.block_size, self.width, self.limit = block_size, block_size * TOKEN_BYTES, limit
        self.blocks: dict[int, Published] = {}
        self.waiting: list[Event] = []
        self.is_behind = False
        self.num_dropped = 0
        self.mutex = threading.Lock()

    def stored(self, stored: Stored) -> None:
        """Note the blocks that the tree did not have before, as one event.

        Another request may have stored the same text meanwhile: the tree then keeps its own blocks, and is told of
        them a second time.
        """
        with self.mutex:
            known = sum(1 for _ in takewhile(self.blocks.__contains__, stored.blocks[stored.start :]))
            start, stop = stored.start + known, len(stored.blocks)
            if start == stop:
                return
            before = self.blocks.get(stored.blocks[start - 1]) if start else None
            parent = before.key if before else None
            tokens = stored.key[start * self.width : stop * self.width]
            keys = self._keys(parent, tokens, stored)
            for index, (block, key) in enumerate(zip(stored.blocks[start:], keys, strict=False)):
                behind = keys[index - 1] if index else parent
                self.blocks[block] = Published(key, behind, tokens[index * self.width : (index + 1) * self.width])
            if keys:
                self._add(stored_event(keys, parent, tokens, self.block_size))

    def removed(self, blocks: Sequence[int]) -> None:
        """Note the blocks that the tree has evicted, as one event. Costs the same for each, whatever its text."""
        with self.mutex:
            keys = [self.blocks.pop(block).key for block in blocks if block in self.blocks]
            if keys:
                self._add(BlockRemoved([short_hash(key) for key in keys]))

    def cleared(self) -> None:
        """Note that no block is left."""
        with self.mutex:
            self.blocks.clear()
            self._add(AllBlocksCleared())

    def take(self) -> list[Event]:
        """Return the events since the last call, in order; or a snapshot, if some had to be dropped."""
        with self.mutex:
            events, self.waiting = self.waiting, []
            blocks = list(self.blocks.values()) if self.is_behind else None
            self.is_behind = False
        return events if blocks is None else list(snapshot(blocks, self.block_size))

    def take_all(self) -> tuple[list[Event], list[Event]]:
        """Return the events since the last call, and a snapshot of the blocks after them."""
        with self.mutex:
            events, self.waiting = self.waiting, []
            blocks, was_behind = list(self.blocks.values()), self.is_behind
            self.is_behind = False
        whole = list(snapshot(blocks, self.block_size))
        return whole if was_behind else events, whole

    def _keys(self, parent: bytes | None, tokens: bytes, stored: Stored) -> list[bytes]:
        """Return the keys of new blocks behind `parent`, as a router computes them; none if it cannot.

        The blocks of a private namespace never have a key, so those behind them have no parent either.
        """
        if parent is not None:
            return list(chain(parent, tokens, self.width))
        try:
            return block_keys(array("I", tokens), stored.namespace, self.block_size)
        except TypeError:  # the namespace has no bytes to hash
            return []

    def _add(self, event: Event) -> None:
        if not self.is_behind and len(self.waiting) < self.limit:
            self.waiting.append(event)
            return
        self.num_dropped += 1 + len(self.waiting)
        self.is_behind = True
        self.waiting.clear()


def stored_event(keys: Sequence[bytes], parent: bytes | None, tokens: bytes, block_size: int) -> BlockStored:
    """Return the event of blocks with these keys, behind the block with the key `parent`."""
    before = None if parent is None else short_hash(parent)
    return BlockStored([short_hash(key) for key in keys], before, array("I", tokens).tolist(), block_size)


def snapshot(blocks: Sequence[Published], block_size: int) -> Iterator[Event]:
    """Yield the events that lead from any state to exactly these blocks, each of which comes after its parent.

    Neighbours that follow each other also in the text share an event.
    """
    yield AllBlocksCleared()
    first = 0
    for index, block in enumerate(blocks):
        if index + 1 == len(blocks) or blocks[index + 1].parent != block.key:
            run = blocks[first : index + 1]
            tokens = b"".join(one.tokens for one in run)
            yield stored_event([one.key for one in run], run[0].parent, tokens, block_size)
            first = index + 1
