"""Lesson 5. The parts that a manager can be given later, and the null objects that stand in their places here.

    prefixes     keeps KV after a request has ended, for prompts that begin alike: none here, lesson 8's radix tree
    memories     what a request needs besides its table: nothing here, a state in lesson 11, windows in lesson 15
    connector    other places where KV may be: none here, host memory and a disk in lesson 12, a process in lesson 19

The manager asks them in turn and knows the rules of none. Their names are those of vLLM's KV connectors where it has
such a thing.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.request_table import RequestTable

CopyBlocks = Callable[[Sequence[int], Sequence[int]], None]


class Found(NamedTuple):
    """A prompt's prefix that a request would begin with now.

    num_tokens: its length. num_evictable: its blocks that count as free until a request shares them.
    prefix_in_flight: a running request is about to make it longer, so that waiting a step is worth more.
    """

    num_tokens: int = 0
    num_evictable: int = 0
    prefix_in_flight: bool = False


class Stored(NamedTuple):
    """Blocks that a prefix cache has taken: `blocks` hold the tokens of `key`, and those from index `start` on are new.

    key: the tokens, 4 bytes each. namespace: who may find them.
    """

    key: bytes
    namespace: Hashable
    blocks: Sequence[int]
    start: int


class Prefixes(Protocol):
    """A cache of prefixes: `NoPrefixes`, or lesson 8's PrefixCache. What it notes of a request is in `table.shared`."""

    tree: Any
    """Lesson 8's radix tree; None where nothing is cached."""

    stats: Any
    """Hits and misses so far, lesson 8's HitStats; None where nothing is cached."""

    @property
    def allocator(self) -> BlockAllocator:
        """Hands out the pool's blocks."""
        ...

    @property
    def num_evictable(self) -> int:
        """Blocks that only the cache holds: it gives them up when they are needed."""
        ...

    def peek(self, token_ids: Sequence[int], namespace: Hashable, running: Mapping[str, RequestTable]) -> Found:
        """Return what `begin` would find. Changes nothing."""
        ...

    def begin(self, table: RequestTable, token_ids: Sequence[int], namespace: Hashable) -> int:
        """Begin an empty table with the blocks of the longest cached prefix; return how many tokens they hold."""
        ...

    def num_known(self, table: RequestTable) -> int:
        """Return how many tokens of the request's prompt are cached, even if it could not begin behind all of them."""
        ...

    def num_shared(self, table: RequestTable, num_tokens: int) -> int:
        """Return how many shared blocks must be copied before the table can grow to `num_tokens` tokens."""
        ...

    def prepare(self, table: RequestTable, num_tokens: int, copy: CopyBlocks, num_more: int = 0) -> None:
        """Ensure that the table can grow to `num_tokens` tokens: evict, and copy what it may not write.

        Args:
            num_more: blocks that the request's memories take besides.
        """
        ...

    def commit(
        self, table: RequestTable, token_ids: Sequence[int], num_computed: int, to_the_end: bool
    ) -> Stored | None:
        """Take the blocks that are full by now. Return them, or None if there is nothing new.

        Args:
            to_the_end: the request's memories are worth keeping here, so take every block, and return them.
        """
        ...

    def extend(self, table: RequestTable, num_tokens: int) -> None:
        """Take the blocks up to `num_tokens` tokens, which a connector has just filled."""
        ...

    def truncate(self, table: RequestTable) -> None:
        """Note that the table has become shorter: other tokens may follow now."""
        ...

    def release(self, table: RequestTable, computed_ids: Sequence[int]) -> Stored | None:
        """Take the whole blocks of a request that ends; return them. Its table is freed next.

        What the request has locked is unlocked even if that fails. A table that did not begin has locked nothing.
        """
        ...

    def shared(self, blocks: Collection[int]) -> list[int]:
        """Return those of `blocks` that have several holders."""
        ...

    def clear(self) -> None:
        """Give up all that is cached. Raises ValueError, and gives up nothing, while a request uses some of it."""
        ...


class NoPrefixes:
    """The prefix cache of a manager that caches nothing."""

    tree = stats = None
    num_evictable = 0

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)

    def peek(self, token_ids: Sequence[int], namespace: Hashable, running: Mapping[str, RequestTable]) -> Found:
        """Find nothing."""
        return Found()

    def begin(self, table: RequestTable, token_ids: Sequence[int], namespace: Hashable) -> int:
        """Find nothing."""
        return 0

    def num_known(self, table: RequestTable) -> int:
        """Return 0."""
        return 0

    def num_shared(self, table: RequestTable, num_tokens: int) -> int:
        """Return 0: each block has one holder."""
        return 0

    def prepare(self, table: RequestTable, num_tokens: int, copy: CopyBlocks, num_more: int = 0) -> None:
        """Do nothing: there is nothing to evict or to copy."""

    def commit(
        self, table: RequestTable, token_ids: Sequence[int], num_computed: int, to_the_end: bool
    ) -> Stored | None:
        """Take nothing."""

    def extend(self, table: RequestTable, num_tokens: int) -> None:
        """Take nothing."""

    def truncate(self, table: RequestTable) -> None:
        """Note nothing."""

    def release(self, table: RequestTable, computed_ids: Sequence[int]) -> Stored | None:
        """Take nothing."""

    def shared(self, blocks: Collection[int]) -> list[int]:
        """Return none."""
        return []

    def clear(self) -> None:
        """Do nothing."""


class BlockNeeds(Protocol):
    """The blocks that a memory takes of the pool, beside those of the request's table: `NO_BLOCKS`, or lesson 15's."""

    def most(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens ever holds."""
        ...

    def cost(self, num_tokens: int, num_found: int) -> int:
        """Return how many a request takes that begins behind `num_found` tokens and is promised room for all."""
        ...

    def num_reserved(self, request_id: str, num_tokens: int) -> int:
        """Return how many more a running request takes at the most until `num_tokens` tokens are computed."""
        ...

    def num_missing(self, request_id: str, num_tokens: int, num_loaded: int) -> int:
        """Return how many `grow` takes."""
        ...

    def grow(self, request_id: str, num_tokens: int, num_loaded: int) -> None:
        """Take blocks for `num_tokens` tokens. The first `num_loaded` come from a connector and are not computed."""
        ...


class NoBlocks:
    """The needs of a memory that takes no blocks."""

    def most(self, num_tokens: int) -> int:
        """Return 0."""
        return 0

    def cost(self, num_tokens: int, num_found: int) -> int:
        """Return 0."""
        return 0

    def num_reserved(self, request_id: str, num_tokens: int) -> int:
        """Return 0."""
        return 0

    def num_missing(self, request_id: str, num_tokens: int, num_loaded: int) -> int:
        """Return 0."""
        return 0

    def grow(self, request_id: str, num_tokens: int, num_loaded: int) -> None:
        """Take nothing."""


NO_BLOCKS = NoBlocks()


class CacheMemory(Protocol):
    """What a request needs besides its table: lesson 11's StateMemory, lesson 15's WindowMemory.

    It knows requests by their ids.
    """

    @property
    def blocks(self) -> BlockNeeds:
        """What it takes of the pool."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether one more request can begin."""
        ...

    def check_room(self) -> None:
        """Raise OutOfBlocks unless one more request can begin."""
        ...

    def begin(self, request_id: str, num_tokens: int, table: RequestTable, num_known: int) -> None:
        """Begin a prompt of `num_tokens` tokens behind those of its table. The cache has K and V of `num_known`."""
        ...

    def resume(self, request_id: str, table: RequestTable) -> None:
        """Go on behind the table's tokens: a connector has filled this memory too."""
        ...

    def chunk_end(self, request_id: str, start: int, stop: int) -> int:
        """Return where a chunk from `start` to at most `stop` should end, to be worth keeping there."""
        ...

    def commit(self, request_id: str, num_computed: int) -> bool:
        """Note how many tokens have been computed. Return whether it is worth keeping as it is now."""
        ...

    def keep(self, request_id: str, table: RequestTable) -> None:
        """Keep it in the prefix cache, at the end of the table's stored blocks."""
        ...

    def settle(self, request_id: str) -> None:
        """Release what no later token needs. The prefix cache has taken the blocks that it wants."""
        ...

    def announce_drafts(self, request_id: str, num_drafts: int) -> None:
        """Prepare for tokens that may be taken back after the next step."""
        ...

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Go back to `num_tokens` tokens. Raises ValueError if that is impossible, and changes nothing."""
        ...

    def free(self, request_id: str) -> None:
        """Release all that the request has of it, even if an error comes in between. Unknown ids are ignored."""
        ...


class TierStats(NamedTuple):
    """Statistics of a place behind the pool, since the start.

    name: of the place. num_bytes: that it holds now. events: how often each has happened; the names are its own.
    state: numbers that are true now, by names of its own.
    """

    name: str
    num_bytes: int
    events: Mapping[str, int]
    state: Mapping[str, int] = MappingProxyType({})

    def plus(self, **more: int) -> "TierStats":
        """Return these statistics with more events counted, of names that are here already."""
        return self._replace(events={name: count + more.get(name, 0) for name, count in self.events.items()})


class Matched(NamedTuple):
    """KV behind a prompt's first tokens: of `num_tokens` tokens. load_async: it is on its way, so wait a step."""

    num_tokens: int = 0
    load_async: bool = False


NO_MATCH = Matched()


class Load(Protocol):
    """KV that a connector has found: `num_tokens` tokens, whole blocks."""

    @property
    def num_tokens(self) -> int: ...

    def into(self, request_id: str, blocks: Sequence[int]) -> None:
        """Write it into these blocks, and what belongs to it into the request's memories."""
        ...


class Text(Protocol):
    """What a connector may know of a request: lesson 5's Request. token_ids: all that are known now."""

    id: str
    namespace: Hashable

    @property
    def token_ids(self) -> Sequence[int]: ...


class KvConnector(Protocol):
    """Other places where KV may be: `NO_CONNECTOR`, lesson 12's tiers, lesson 19's prefill workers.

    Two sides, divided and named as in vLLM's KVConnectorBase_V1. The scheduler's side is asked with numbers, before a
    request is admitted and when it ends; the worker's side moves bytes.
    """

    @property
    def stats(self) -> Sequence[TierStats]:
        """Statistics of each place."""
        ...

    # ---------------------------------------------------------------- the scheduler's side

    def request_added(self, request: Text) -> None:
        """Note that a request waits from now on. It may wait again later, with more tokens."""
        ...

    def get_num_new_matched_tokens(
        self, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Matched:
        """Return what there is behind a prompt's first tokens. Asked at each step as long as the request waits.

        Args:
            num_computed_tokens: the first tokens, which the pool has.
            may_wait: no other request runs, so the connector may wait a moment before it answers.
        """
        ...

    def update_state_after_alloc(self, request_id: str, table: RequestTable, num_computed_tokens: int) -> None:
        """Note that the request has been admitted: its table has blocks with KV of its first tokens."""
        ...

    def request_finished(self, request_id: str) -> None:
        """Note that the request has given up its place, whether it ran or waited: nothing is needed for it now.

        An error, here or in `save_kv` at that time, is logged: no block of the pool depends on it.
        """
        ...

    # ---------------------------------------------------------------- the worker's side

    def start_load_kv(
        self, request_id: str, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Load:
        """Return the KV that is at hand behind the first tokens; the arguments are as above."""
        ...

    def save_kv(self, request_id: str, stored: Stored, is_kept: bool) -> None:
        """Save blocks that the prefix cache has taken.

        Args:
            is_kept: the request's memories are at the end of these blocks, and worth saving with them.
        """
        ...

    def shutdown(self) -> None:
        """Give up what the connector holds outside the pool: threads, processes. Idempotent."""
        ...


class Nothing:
    """A load of no tokens."""

    num_tokens = 0

    def into(self, request_id: str, blocks: Sequence[int]) -> None:
        """Do nothing."""


class NoConnector:
    """The connector of a manager whose KV is in the pool or nowhere."""

    stats: Sequence[TierStats] = ()

    def request_added(self, request: Text) -> None:
        """Note nothing."""

    def get_num_new_matched_tokens(
        self, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Matched:
        """Find nothing."""
        return NO_MATCH

    def update_state_after_alloc(self, request_id: str, table: RequestTable, num_computed_tokens: int) -> None:
        """Note nothing."""

    def request_finished(self, request_id: str) -> None:
        """Note nothing."""

    def start_load_kv(
        self, request_id: str, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Load:
        """Find nothing."""
        return NOTHING

    def save_kv(self, request_id: str, stored: Stored, is_kept: bool) -> None:
        """Save nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


NOTHING = Nothing()
NO_CONNECTOR = NoConnector()
