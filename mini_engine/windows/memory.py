"""Lesson 15. Windows as a memory of lesson 5's manager: blocks that a request holds beside its table, and gives up.

As soon as a block has been filled, nothing later sees what lies W tokens before its end: those blocks become holes, and
free. A chunk sees further back, by as many tokens as it has. So a request never holds more blocks than a window and
one chunk take, however long its text is; and that is all that it is promised.

Where a request can begin in a stored prefix is another question with the same answer as for lesson 11's states: where
the tree has what the last tokens before it need. There it was a checkpoint, here it is a window.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from mini_engine.kv.memory import CacheMemory, Lookup
from mini_engine.kv.radix_node import Node
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.kv.request_table import RequestTable
from mini_engine.windows.kept import KeptWindows
from mini_engine.windows.window_table import WindowTable


@dataclass
class WindowHold:
    """The blocks that a request holds in the window groups.

    table: its blocks in them. main: its blocks in group 0, the manager's table.
    num_computed: tokens that have K and V. num_kept: blocks that the tree was offered companions for.
    ends: blocks of the prompt behind which another request may begin.
    """

    table: WindowTable
    main: RequestTable
    num_computed: int
    num_kept: int = 0
    ends: set[int] = field(default_factory=set)


class WindowMemory(CacheMemory):
    """The blocks of window groups: of running requests, and of prefixes in the tree.

    Args:
        allocator: of the pool, also that of group 0. window: W. num_groups: groups with windows.
        max_step: the most tokens that a step computes of one request.
    """

    begins_everywhere = False

    def __init__(self, allocator: RefCountedAllocator, window: int, num_groups: int, max_step: int) -> None:
        self.allocator, self.num_groups, self.max_step = allocator, num_groups, max_step
        self.block_size = allocator.block_size
        self.kept = KeptWindows(allocator, window, num_groups)
        self.holds: dict[str, WindowHold] = {}

    def tables_of(self, request_id: str) -> WindowTable:
        """Return a running request's tables in the window groups."""
        return self.holds[request_id].table

    # ---------------------------------------------------------------- how many blocks

    @property
    def most_held(self) -> int:
        """The most blocks that one request holds in a group: those of a window and of one step.

        It keeps what W - 1 tokens fill that end where a block ends, and a step fills up to `max_step` slots behind
        them. How many blocks a step touches depends on where in a block its first token lies: this is the worst case.
        """
        size = self.block_size
        return -(-(self.kept.window - 1) // size) + (self.max_step + size - 2) // size + 1

    def num_needed(self, num_tokens: int, num_computed: int, num_held: int) -> int:
        """Return how many more blocks of all groups a request needs at most until `num_tokens` tokens are computed.

        If one step is left, at most `max_step` tokens, nothing is freed before it ends: it needs every block from
        `kept.first_block` on. If more are left, the request frees blocks as it goes. Then it never holds more than
        `most_held` in a group, nor more than all its tokens fill. The result is never negative.

        Args:
            num_computed: tokens computed so far.
            num_held: blocks that each group has now, all of them from `kept.first_block(num_computed)` on.
        """
        num_blocks = -(-num_tokens // self.block_size)
        if num_tokens - num_computed > self.max_step:
            return self.num_groups * max(0, min(num_blocks, self.most_held) - num_held)
        return self.num_groups * max(0, num_blocks - self.kept.first_block(num_computed) - num_held)

    def most(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens ever holds."""
        return self.num_groups * min(-(-num_tokens // self.block_size), self.most_held)

    def cost(self, num_tokens: int, num_found: int) -> int:
        """Return how many blocks a request takes that begins behind `num_found` tokens and grows to `num_tokens`."""
        num_held = num_found // self.block_size - self.kept.first_block(num_found)
        return self.num_needed(num_tokens, num_found, num_held)

    def num_reserved(self, request_id: str, num_tokens: int) -> int:
        """Return how many more blocks a running request needs until `num_tokens` tokens are computed."""
        hold = self.holds[request_id]
        return self.num_needed(num_tokens, hold.num_computed, len(hold.table) - hold.table.first)

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """Return how many blocks `grow` would take."""
        hold = self.holds[request_id]
        first = self.kept.first_block(hold.num_computed)
        return hold.table.num_missing(-(-num_tokens // self.block_size), first)

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Ensure that the request has slots for `num_tokens` tokens, as far as they will be seen."""
        hold = self.holds[request_id]
        first = self.kept.first_block(hold.num_computed)
        if first > len(hold.table):
            self._slide(hold, len(hold.table))
        hold.table.grow(-(-num_tokens // self.block_size), first)

    # ---------------------------------------------------------------- a request's life

    def begin(self, request_id: str, num_tokens: int, table: RequestTable, num_known: int) -> None:
        """Begin behind the tokens of `table`, which have K and V: make the request's WindowHold.

        Its WindowTable has holes before the first block that the next token sees, and from there on the companions of
        the table's blocks, which it uses from now on. The tree need not be offered companions for any of these blocks.

        Args:
            num_tokens: of the prompt. num_known: how many of them the tree has in group 0. `_ends` takes both.
            table: of group 0; it holds the blocks of the tokens that were found, and may be empty.
        """
        first = self.kept.first_block(table.num_tokens)
        windows = WindowTable(self.allocator, self.num_groups)
        windows.adopt(first, self.kept.use(table.blocks[first:]))
        ends = self._ends(num_tokens, num_known)
        self.holds[request_id] = WindowHold(windows, table, table.num_tokens, len(table.blocks), ends)

    def expect(self, request_id: str, num_tokens: int) -> None:
        """Count the first `num_tokens` tokens as computed: of their blocks, only the last window is needed."""
        self.holds[request_id].num_computed = num_tokens

    def resume(self, request_id: str, table: RequestTable) -> None:
        """Go on behind the table's tokens: a connector has filled the last window."""
        self.holds[request_id].num_computed = table.num_tokens
        self.settle(request_id)

    def commit(self, request_id: str, num_computed: int) -> bool:
        """Note how many tokens have been computed. Return False: blocks of an answer are kept when it ends."""
        self.holds[request_id].num_computed = num_computed
        return False

    def keep(self, request_id: str, table: RequestTable) -> None:
        """Note that others may begin where the stored blocks end: another memory has been kept there."""
        self.holds[request_id].ends.add(table.shared.num_stored)

    def settle(self, request_id: str) -> None:
        """Leave companions for the blocks that the tree has taken, then free what no later token sees."""
        hold = self.holds[request_id]
        self._keep(hold)
        self._slide(hold, self.kept.first_block(hold.num_computed))

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Free the blocks behind `num_tokens` tokens.

        Raises:
            ValueError: fewer tokens than have been computed; nothing was changed.
        """
        hold = self.holds[request_id]
        if num_tokens < hold.num_computed:
            raise ValueError(
                f"cannot keep {num_tokens} of {hold.num_computed} computed tokens: the window before them is gone; "
                "free the request and compute it again"
            )
        hold.table.truncate(-(-num_tokens // self.block_size))

    def free(self, request_id: str) -> None:
        """Release the request's blocks, if it has any. What the tree has taken keeps its last window."""
        hold = self.holds.pop(request_id, None)
        if hold is None:
            return
        hold.num_kept = 0  # what was evicted meanwhile may be offered again
        try:
            self._keep(hold, is_end=True)
        finally:
            self._slide(hold, len(hold.table))

    def _ends(self, num_tokens: int, num_known: int) -> set[int]:
        """Return after how many blocks of a prompt others may begin: where it leaves what is known, and at its end."""
        return {tokens // self.block_size for tokens in (num_known, num_tokens - 1, num_tokens)}

    def _keep(self, hold: WindowHold, is_end: bool = False) -> None:
        num_stored = hold.main.shared.num_stored
        for index in range(max(hold.num_kept, hold.table.first), num_stored):
            self.kept.keep(hold.main.blocks[index], hold.table.at(index))
        reached = {end for end in hold.ends if end <= num_stored}
        hold.num_kept, hold.ends = num_stored, hold.ends - reached
        for end in {*reached, num_stored} if is_end else reached:
            self.kept.prove(hold.main.blocks[self.kept.first_block(end * self.block_size) : end])

    def _slide(self, hold: WindowHold, first: int) -> None:
        for index, companion in hold.table.slide(first):
            self.kept.release(hold.main.blocks[index], companion)

    # ---------------------------------------------------------------- where a request can begin

    def last(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return how many tokens of `key` lie before the last place to begin in the part of it that is stored."""
        return self.kept.num_usable(tree.prefix(key, namespace)) * self.block_size

    def num_evictable_after(self, tree: Lookup, key: bytes, namespace: Hashable) -> int:
        """Return how many evictable blocks a request takes that begins behind `key`."""
        blocks = tree.prefix(key, namespace)
        return self.kept.evictable_in(blocks[self.kept.first_block(len(blocks) * self.block_size) :])

    # ---------------------------------------------------------------- what the tree holds beside its own blocks

    @property
    def num_evictable(self) -> int:
        """Companions' blocks that only the tree holds."""
        return self.kept.num_evictable

    @property
    def blocks_each(self) -> int:
        """Blocks that go with one of the tree's own, itself included, if it has a companion."""
        return 1 + self.num_groups

    def trim(self, num_blocks: int) -> None:
        """Free `num_blocks` blocks of companions before the tree gives up any of its own, or as many as may go then."""
        self.kept.trim(num_blocks)

    def evict(self, num_blocks: int) -> None:
        """Free `num_blocks` blocks of companions when the tree has no leaf left, or all of them if there are fewer."""
        self.kept.evict(num_blocks)

    def drop(self, node: Node, blocks: Iterable[int]) -> None:
        """Forget the companions of blocks that the tree gives up."""
        for block in blocks:
            self.kept.drop(block)

    def shorten(self, leaf: Node) -> int:
        """Note that a text may end at its last place to begin. Return how many blocks of the leaf lie behind it."""
        blocks = [block for node in reversed(list(leaf.path())) for block in node.blocks]
        end = self.kept.num_usable(blocks)
        self.kept.prove(blocks[self.kept.first_block(end * self.block_size) : end])
        return min(len(leaf.blocks), len(blocks) - end)
