"""Lesson 15. Several memories as one, for a model that needs all of them: states and windows, for example.

A request can begin only after a prefix that every memory can resume from. Each one shortens what the others accept,
until none does: a fixed point.

    cached prefix      ── 0 ────── 16 ────── 32 ────── 48 ──
    states             ·           ●                   ●         checkpoints after 16 and 48 tokens
    windows            ·           ●         ●                   complete after 16 and 32 tokens
    after 48?          states: 48 → windows: 32 → states: 16 → windows: 16 → states: 16, and none shortens it any more
"""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import ExitStack

from mini_engine.kv.memory import CacheMemory, Lookup
from mini_engine.kv.radix_node import TOKEN_BYTES, Node
from mini_engine.kv.request_table import RequestTable


class Memories(CacheMemory):
    """Asks each of several memories in turn. The methods are those of CacheMemory.

    Args:
        memories: the one that keeps the fewest places first: on the way there a request passes those of the others.
    """

    begins_everywhere = False

    def __init__(self, memories: Sequence[CacheMemory]) -> None:
        self.memories = memories

    # ---------------------------------------------------------------- how many blocks

    def most(self, num_tokens: int) -> int:
        """Return the sum of what they ever take."""
        return sum(memory.most(num_tokens) for memory in self.memories)

    def cost(self, num_tokens: int, num_found: int) -> int:
        """Return the sum of what they take."""
        return sum(memory.cost(num_tokens, num_found) for memory in self.memories)

    def num_reserved(self, request_id: str, num_tokens: int) -> int:
        """Return the sum of what they may still take."""
        return sum(memory.num_reserved(request_id, num_tokens) for memory in self.memories)

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """Return how many blocks `grow` takes."""
        return sum(memory.num_missing(request_id, num_tokens) for memory in self.memories)

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Let each of them grow."""
        for memory in self.memories:
            memory.grow(request_id, num_tokens)

    # ---------------------------------------------------------------- a request's life

    @property
    def has_room(self) -> bool:
        """True if all have room for one more request."""
        return all(memory.has_room for memory in self.memories)

    def begin(self, request_id: str, num_tokens: int, table: RequestTable, num_known: int) -> None:
        """Begin in each of them."""
        for memory in self.memories:
            memory.begin(request_id, num_tokens, table, num_known)

    def expect(self, request_id: str, num_tokens: int) -> None:
        """Announce a connector's tokens to each of them."""
        for memory in self.memories:
            memory.expect(request_id, num_tokens)

    def resume(self, request_id: str, table: RequestTable) -> None:
        """Go on in each of them."""
        for memory in self.memories:
            memory.resume(request_id, table)

    def chunk_end(self, request_id: str, start: int, stop: int) -> int:
        """Return the first end that one of them asks for."""
        for memory in self.memories:
            stop = memory.chunk_end(request_id, start, stop)
        return stop

    def commit(self, request_id: str, num_computed: int) -> bool:
        """Return True if one of them is worth keeping: each hears of it."""
        worth = [memory.commit(request_id, num_computed) for memory in self.memories]
        return any(worth)

    def keep(self, request_id: str, table: RequestTable) -> None:
        """Keep all of them: one alone would be of no use here."""
        for memory in self.memories:
            memory.keep(request_id, table)

    def settle(self, request_id: str) -> None:
        """Release what no later token needs."""
        for memory in self.memories:
            memory.settle(request_id)

    def announce_drafts(self, request_id: str, num_drafts: int) -> None:
        """Announce drafts to each of them."""
        for memory in self.memories:
            memory.announce_drafts(request_id, num_drafts)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Truncate each of them. None can forget a token that has been computed, so the first one refuses for all."""
        for memory in self.memories:
            memory.truncate(request_id, num_tokens)

    def free(self, request_id: str) -> None:
        """Release the request's share of each of them, whatever another one raises."""
        with ExitStack() as stack:
            for memory in self.memories:
                stack.callback(memory.free, request_id)

    # ---------------------------------------------------------------- where a request can begin

    def last(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return the longest part of `key`, in tokens, after which all of them can begin."""
        end, before = len(key) // TOKEN_BYTES, -1
        while end != before:
            before = end
            for memory in self.memories:
                end = memory.last(tree, key[: end * TOKEN_BYTES], namespace)
        return end

    def num_evictable_after(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return the sum of the evictable blocks that they would use."""
        return sum(memory.num_evictable_after(tree, key, namespace) for memory in self.memories)

    def coming(self, request_id: str, table: RequestTable, num_found: int) -> Iterable[int]:
        """Return the places of the first, which are the fewest."""
        return self.memories[0].coming(request_id, table, num_found)

    # ---------------------------------------------------------------- what the tree holds beside its own blocks

    @property
    def num_evictable(self) -> int:
        """The sum of the blocks that only the tree holds."""
        return sum(memory.num_evictable for memory in self.memories)

    @property
    def blocks_each(self) -> int:
        """Blocks that go with one of the tree's own, itself included."""
        return 1 + sum(memory.blocks_each - 1 for memory in self.memories)

    def trim(self, num_blocks: int) -> None:
        """Free `num_blocks` of the blocks that can go first."""
        for memory in self.memories:
            before = memory.num_evictable
            memory.trim(num_blocks)
            num_blocks -= before - memory.num_evictable

    def evict(self, num_blocks: int) -> None:
        """Free `num_blocks` of the others."""
        for memory in self.memories:
            before = memory.num_evictable
            memory.evict(num_blocks)
            num_blocks -= before - memory.num_evictable

    def drop(self, node: Node, blocks: Sequence[int]) -> None:
        """Forget what goes with these blocks."""
        for memory in self.memories:
            memory.drop(node, blocks)

    def shorten(self, leaf: Node) -> int:
        """Return how many more blocks go: those that one of them can no longer begin after."""
        return max(memory.shorten(leaf) for memory in self.memories)
