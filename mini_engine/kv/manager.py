"""Lesson 5. Keeps track of which request holds which blocks: it stands between the scheduler and the block tables.

The manager holds numbers, no tensors. `allocate` tells the scheduler how many leading tokens already have KV, and
`commit` and `free` tell the manager which tokens have been computed, so the scheduler need not know whether anything is
cached. Nothing is here: `allocate` always answers 0. What later lessons add are parts, handed in (`seams.py`).
"""

import logging
from array import array
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from mini_engine.errors import EngineDead, OutOfBlocks, UserError
from mini_engine.kv.request_table import RequestTable
from mini_engine.kv.seams import NO_CONNECTOR, CacheMemory, CopyBlocks, KvConnector, NoPrefixes, Prefixes, TierStats

log = logging.getLogger(__name__)


class BlocksByState(NamedTuple):
    """The pool's blocks by state, without the null block. `cached` stays 0 until lesson 8 keeps prefixes."""

    free: int
    held: int
    cached: int = 0


class Cost(NamedTuple):
    """The cost of admitting a request: `num_blocks` of the free blocks.

    should_wait: more of what it needs is on its way, or a place for it, so it is better admitted one step later. Never
        so in a manager without parts.
    """

    num_blocks: int
    should_wait: bool = False


def no_store(sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy nothing: the block copier of a manager without a pool."""


class KvCacheManager:
    """Maps request ids to block tables. Each method but `free` succeeds completely, or raises and changes nothing.

    Args:
        num_blocks: blocks in the pool, including the null block.
        block_size: slots per block.
        copy: copies blocks in the pool, `KvPool.copy_blocks`: it reads all sources before it writes any target.
        prefixes: makes the prefix cache, of the first two.
        memories: what requests need besides their tables.
        connector: other places where KV may be.

    Attributes:
        fault: why the blocks cannot be trusted any more, so that no step may run; empty as long as they can.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        copy: CopyBlocks = no_store,
        *,
        prefixes: Callable[[int, int], Prefixes] = NoPrefixes,
        memories: Sequence[CacheMemory] = (),
        connector: KvConnector = NO_CONNECTOR,
    ) -> None:
        self.prefixes = prefixes(num_blocks, block_size)
        self.allocator = self.prefixes.allocator
        self.copy, self.memories, self.connector = copy, memories, connector
        self.tables: dict[str, RequestTable] = {}
        self.fault = ""

    @property
    def block_size(self) -> int:
        """Slots per block."""
        return self.allocator.block_size

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks that requests can hold in total: the pool without the null block."""
        return self.allocator.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that `grow` can hand out now, including those of cached prefixes that can be evicted."""
        return self.allocator.num_free + self.prefixes.num_evictable

    @property
    def tier_stats(self) -> Sequence[TierStats]:
        """Statistics of each place behind the pool."""
        return self.connector.stats

    def cost(self, token_ids: Sequence[int], num_tokens: int, namespace: Hashable = None) -> Cost:
        """Return the cost of admitting a request now and promising it room. Takes no block.

        What is elsewhere may be fetched meanwhile, if that can be done without this request's blocks.

        Args:
            num_tokens: the number of tokens it is promised room for, at least len(token_ids).
            namespace: as for `allocate`.
        """
        found = self.prefixes.peek(token_ids, namespace, self.tables)
        num_blocks = -(-(num_tokens - found.num_tokens) // self.block_size) + found.num_evictable
        num_blocks += sum(memory.blocks.cost(num_tokens, found.num_tokens) for memory in self.memories)
        should_wait = found.prefix_in_flight or not all(memory.has_room for memory in self.memories)
        if not should_wait:
            num_found, may_wait = found.num_tokens, not self.tables
            should_wait = self._is_coming(token_ids, namespace, num_found, may_wait)
        return Cost(num_blocks, should_wait)

    def _is_coming(self, token_ids: Sequence[int], namespace: Hashable, num_found: int, may_wait: bool) -> bool:
        """Whether the connector has more on its way. If it fails, it has nothing."""
        try:
            return self.connector.get_num_new_matched_tokens(token_ids, namespace, num_found, may_wait).load_async
        except (EngineDead, NotImplementedError):
            raise
        except Exception:
            log.exception("the connector cannot say what it has; nothing is expected of it")
            return False

    def allocate(self, request_id: str, token_ids: Sequence[int], namespace: Hashable = None) -> int:
        """Begin a table for a request that has none.

        Args:
            namespace: requests of the same namespace may share prefixes, if they are cached.

        Returns:
            the number of leading tokens that already have KV, in blocks that the table now holds.

        Raises:
            ValueError: the request has a table. OutOfBlocks: a memory has no room. Nothing was changed.
        """
        if request_id in self.tables:
            raise ValueError(f"request {request_id!r} has a block table already; free it or grow it")
        for memory in self.memories:
            memory.check_room()
        found = self._begin(request_id, token_ids, namespace)
        try:
            found = self._load(request_id, token_ids, namespace, found)
        except (EngineDead, NotImplementedError):
            raise
        except Exception:  # as if there had been nothing to load
            log.exception("the connector could not load KV for request %s, so it is computed", request_id)
            self._release_pool(request_id)
            found = self._begin(request_id, token_ids, namespace)
        self._tell_connector(self.connector.update_state_after_alloc, request_id, self.tables[request_id], found)
        return found

    def _begin(self, request_id: str, token_ids: Sequence[int], namespace: Hashable) -> int:
        """Begin a table and the request's memories behind what the prefix cache has; return how many tokens that is."""
        table = self.tables[request_id] = RequestTable(self.allocator)
        found = self.prefixes.begin(table, token_ids, namespace)
        for memory in self.memories:
            memory.begin(request_id, len(token_ids), table, self.prefixes.num_known(table))
        return found

    def _load(self, request_id: str, token_ids: Sequence[int], namespace: Hashable, num_found: int) -> int:
        """Put what the connector has behind the first tokens, if there is room. Return how many have KV then."""
        may_wait = len(self.tables) == 1
        load = self.connector.start_load_kv(request_id, token_ids, namespace, num_found, may_wait)
        if not load.num_tokens:
            return num_found
        try:
            self.grow(request_id, num_found + load.num_tokens, num_loaded=num_found + load.num_tokens)
        except OutOfBlocks:  # they are computed later, chunk by chunk
            return num_found
        table = self.tables[request_id]
        load.into(request_id, table.blocks[num_found // self.block_size :])
        self.prefixes.extend(table, table.num_tokens)
        for memory in self.memories:
            memory.resume(request_id, table)
        return table.num_tokens

    def missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """Return how many more blocks the request needs to have slots for `num_tokens` tokens in total."""
        table = self.tables[request_id]
        missing = max(0, -(-num_tokens // self.allocator.block_size) - len(table.blocks))
        for memory in self.memories:
            missing += memory.blocks.num_reserved(request_id, num_tokens)
        return missing + self.prefixes.num_shared(table, num_tokens)

    def grow(self, request_id: str, num_tokens: int, num_loaded: int = 0) -> array:
        """Ensure that the request has slots for `num_tokens` tokens in total. Never takes any away.

        Its table's `num_tokens` rises to `num_tokens`; it never falls. The request's memories grow with it.

        Args:
            num_loaded: the first tokens, which a connector fills and no step computes.

        Returns:
            its blocks, in order, as an int32 array: the table's `row`.

        Raises:
            OutOfBlocks: the pool cannot give the missing blocks; nothing was changed.
            KeyError: the request has no table.
        """
        table = self.tables[request_id]
        num_more = 0
        for memory in self.memories:
            num_more += memory.blocks.num_missing(request_id, num_tokens, num_loaded)
        self.prefixes.prepare(table, num_tokens, self.copy, num_more)
        if num_tokens > len(table.blocks) * self.allocator.block_size:
            table.append(num_tokens - table.num_tokens)
            for memory in self.memories:
                memory.blocks.grow(request_id, num_tokens, num_loaded)
        elif num_tokens > table.num_tokens:  # most decode steps: the last block still has room
            table.num_tokens = num_tokens
        return table.row

    def announce_drafts(self, request_id: str, num_drafts: int) -> None:
        """Announce that the request's last `num_drafts` tokens are guesses, which `truncate` may take back."""
        for memory in self.memories:
            memory.announce_drafts(request_id, num_drafts)

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Report that the first `num_computed` tokens have KV. Whole blocks of them can be shared now."""
        table = self.tables[request_id]
        keeping = [memory for memory in self.memories if memory.commit(request_id, num_computed)]
        stored = self.prefixes.commit(table, token_ids, num_computed, bool(keeping))
        if stored is not None:
            is_kept = bool(keeping) and len(stored.blocks) * self.block_size == num_computed
            if is_kept:
                for memory in keeping:
                    memory.keep(request_id, table)
            self._tell_connector(self.connector.save_kv, request_id, stored, is_kept)
        for memory in self.memories:
            memory.settle(request_id)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Keep the request's first `num_tokens` tokens; free the blocks that hold none of them.

        Raises:
            ValueError: it holds fewer tokens, num_tokens is negative, or a memory cannot go back so far; nothing was
                changed.
            KeyError: the request has no table.
        """
        table = self.tables[request_id]
        for memory in self.memories:
            memory.truncate(request_id, num_tokens)
        table.truncate(num_tokens)
        self.prefixes.truncate(table)

    def free(self, request_id: str, computed_ids: Sequence[int] = ()) -> None:
        """Free all that a request holds; unknown ids are ignored.

        Each part releases its share, whatever another one raises. If one fails, blocks may be lost, or free although
        they are in use: `fault` says so from then on. An error of the connector is only logged, because it has copies.

        Args:
            computed_ids: its leading tokens whose KV is written: a prefix cache keeps them.

        Raises:
            EngineDead: a part failed; the others have released what they had.
        """
        try:
            self._release(request_id, computed_ids)
        except BaseException as error:  # Ctrl-C, too, may have left a part half done
            if not isinstance(error, EngineDead):
                log.exception("not all that request %s held could be released", request_id)
            self.fault = self.fault or lost(request_id, error)
            if isinstance(error, Exception):
                raise EngineDead(self.fault) from error
            raise

    def _release(self, request_id: str, computed_ids: Sequence[int]) -> None:
        with ExitStack() as parts:  # calls each of them, the last one first, even if another one raises
            parts.callback(self._release_pool, request_id, computed_ids)
            parts.callback(self._tell_connector, self.connector.request_finished, request_id)

    def _release_pool(self, request_id: str, computed_ids: Sequence[int] = ()) -> None:
        """Release what the request holds in the pool and in its memories, each part whatever another one raises."""
        table = self.tables.pop(request_id, None)
        if table is None:
            return
        with ExitStack() as parts:
            parts.callback(table.free)
            for memory in reversed(self.memories):
                parts.callback(memory.free, request_id)
            parts.callback(self._keep, request_id, table, computed_ids)

    def _keep(self, request_id: str, table: RequestTable, computed_ids: Sequence[int]) -> None:
        """Leave the request's whole blocks to the prefix cache, and copies of them to the connector."""
        if stored := self.prefixes.release(table, computed_ids):
            self._tell_connector(self.connector.save_kv, request_id, stored, False)

    def _tell_connector(self, note: Callable[..., None], *what: Any) -> None:
        """Tell the connector of a request. If that fails, log it: no block depends on it."""
        try:
            note(*what)
        except (EngineDead, NotImplementedError):
            raise
        except Exception:
            log.exception("the connector failed; what it has of request %s may be incomplete", what[0])

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks as if all sources were read before any target is written, so chains and swaps are correct.

        Raises:
            ValueError: lengths differ, a target is named twice or has several holders, or no request holds a block;
                nothing was copied.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets; give one target for each source")
        if len(set(targets)) != len(targets):
            raise ValueError(f"a target is named twice in {list(targets)}; which copy should win?")
        if stray := sorted({*sources, *targets} - self.allocator.held):
            raise ValueError(f"blocks {stray} are not held; copy only between blocks that requests hold")
        if shared := self.prefixes.shared(targets):
            raise ValueError(f"blocks {shared} are shared; copy only into blocks with a single holder")
        self.copy(sources, targets)

    @property
    def blocks_by_state(self) -> BlocksByState:
        """Free, held and cached blocks, counted without reading any table."""
        cached = self.prefixes.num_evictable
        return BlocksByState(self.allocator.num_free, len(self.allocator.held) - cached, cached)


def lost(request_id: str, error: BaseException) -> str:
    """Return a sentence about a request whose blocks could not all be released because of this error."""
    if isinstance(error, EngineDead):
        return str(error)
    return (
        f"not all that request {request_id!r} held could be released ({type(error).__name__}: {error}); "
        "the engine's blocks cannot be trusted any more, start it again"
    )


def blocks_in_budget(budget_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """Return how many blocks fit in a memory budget, including the null block.

    Raises:
        OutOfBlocks: fewer than two fit, which leaves none for requests.
        UserError: the block size is not at least 1.
    """
    if block_size < 1:
        raise UserError(f"block_size is {block_size}; give 1 or more")
    num_blocks = int(budget_bytes // (bytes_per_token * block_size))
    if num_blocks < 2:
        raise OutOfBlocks(
            f"{num_blocks} blocks of {block_size} tokens ({bytes_per_token} bytes each) fit in {budget_bytes} bytes; "
            f"give {2 * bytes_per_token * block_size} or more, or use smaller blocks"
        )
    return num_blocks
