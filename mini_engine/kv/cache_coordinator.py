"""Lesson 8. The coordinator of a manager that caches: it asks its three parts in turn.

    prefixes     keeps KV after a request has ended, for prompts that begin alike: the radix tree
    memory       what a request needs beside its table: nothing here, a state in lesson 11, windows in lesson 15
    connector    other places where KV may be: none here, host memory and a disk in lesson 12, a process in lesson 19

Each is a class whose methods find nothing and do nothing, so a later lesson overrides only what it needs.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from mini_engine.base.errors import EngineDead, OutOfBlocks
from mini_engine.kv.connector import NO_CONNECTOR, NO_MATCH, NOTHING, KvConnector, Load, Text, TierStats
from mini_engine.kv.coordinator import CopyBlocks, Cost, KvCoordinator, no_store
from mini_engine.kv.eviction import EvictionPolicy
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.request_table import RequestTable

AnswerT = TypeVar("AnswerT")
log = logging.getLogger(__name__)


class CacheCoordinator(KvCoordinator):
    """Coordinates a prefix cache, a memory and a connector. The methods are those of KvCoordinator.

    Args:
        num_blocks, block_size, copy: the manager's.
        prefixes: builds the prefix cache, and with it the memory, from num_blocks and block_size.
        connector: other places where KV may be.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        copy: CopyBlocks = no_store,
        *,
        prefixes: Callable[[int, int], PrefixCache] = PrefixCache,
        connector: KvConnector = NO_CONNECTOR,
    ) -> None:
        self.prefixes = prefixes(num_blocks, block_size)
        self.allocator = self.prefixes.allocator
        self.memory = self.prefixes.memory
        self.copy, self.connector = copy, connector
        self.requests: WeakValueDictionary[str, Text] = WeakValueDictionary()

    @property
    def stats(self) -> Sequence[TierStats]:
        """Statistics of each place below the pool."""
        return self.connector.stats

    @property
    def counts(self) -> Mapping[str, int]:
        """What the prefix cache's policy counts."""
        return self.prefixes.tree.policy.counts

    @property
    def num_evictable(self) -> int:
        """Blocks of cached prefixes that can be evicted."""
        return self.prefixes.num_evictable

    @property
    def has_room(self) -> bool:
        """True if the memory has room for one more request."""
        return self.memory.has_room

    def most_beside(self, num_tokens: int) -> int:
        """Return the most blocks that the memory ever takes for a request."""
        return self.memory.most(num_tokens)

    def num_beside(self, request_id: str, table: RequestTable, num_tokens: int) -> int:
        """Count the memory's blocks, and shared ones that have to be copied."""
        return self.memory.num_reserved(request_id, num_tokens) + self.prefixes.num_shared(table, num_tokens)

    def cost(
        self, token_ids: Sequence[int], num_tokens: int, namespace: Hashable, tables: Mapping[str, RequestTable]
    ) -> Cost:
        """Return the cost after the cached prefix; wait for KV that is being computed or on its way, and for memory.

        What is elsewhere may be fetched meanwhile, if that can be done without this request's blocks.
        """
        found = self.prefixes.peek(token_ids, namespace, tables)
        num_blocks = -(-(num_tokens - found.num_tokens) // self.allocator.block_size) + found.num_evictable
        num_blocks += self.memory.cost(num_tokens, found.num_tokens)
        should_wait = found.prefix_in_flight or not self.memory.has_room
        if not should_wait:
            asked = token_ids, namespace, found.num_tokens, not tables
            should_wait = self._ask(NO_MATCH, self.connector.get_num_new_matched_tokens, *asked).load_async
        return Cost(num_blocks, should_wait)

    def request_added(self, request: Text) -> None:
        """Tell the connector and the policy, and remember which session the request belongs to."""
        self.requests[request.id] = request
        if request.session is not None:
            self.prefixes.tree.policy.waits(request.session, request.namespace)
        self.connector.request_added(request)

    def begin(
        self, request_id: str, token_ids: Sequence[int], namespace: Hashable, tables: dict[str, RequestTable]
    ) -> int:
        """Begin after the cached prefix, and after the connector's KV; a connector that fails has none."""
        table, asked = tables[request_id], (token_ids, namespace)
        found = self._begin(request_id, table, *asked)
        may_wait = len(tables) == 1
        load = self._ask(NOTHING, self.connector.start_load_kv, request_id, *asked, found, may_wait)
        if load.num_tokens and not self._ask(False, self._load, request_id, table, load):
            self._end(request_id, tables.pop(request_id))  # the load may be half written
            table = tables[request_id] = RequestTable(self.allocator)
            self._begin(request_id, table, *asked)
        self._ask(None, self.connector.update_state_after_alloc, request_id, table, table.num_tokens)
        return table.num_tokens

    def _begin(self, request_id: str, table: RequestTable, token_ids: Sequence[int], namespace: Hashable) -> int:
        """Begin table and memory after the cached prefix; return how many tokens that has."""
        found = self.prefixes.begin(table, token_ids, namespace)
        if (request := self.requests.get(request_id)) is not None:
            self.prefixes.identify(table, request.session)
        known = found if self.memory.begins_everywhere else self.prefixes.num_known(table)
        self.memory.begin(request_id, len(token_ids), table, known)
        return found

    def _load(self, request_id: str, table: RequestTable, load: Load) -> bool:
        """Load the connector's KV after the table's tokens, if there is room. Return True: nothing has failed."""
        num_found, num_blocks = table.num_tokens, len(table.blocks)
        num_tokens = num_found + load.num_tokens
        self.memory.expect(request_id, num_tokens)
        try:
            self.prepare(request_id, table, num_tokens)
            table.append(load.num_tokens)
        except OutOfBlocks:  # they are computed later, chunk by chunk
            self.memory.expect(request_id, num_found)
            return True
        load.into(request_id, table.blocks[num_blocks:])
        self.prefixes.extend(table, num_tokens)
        self.memory.resume(request_id, table)
        return True

    def prepare(self, request_id: str, table: RequestTable, num_tokens: int) -> None:
        """Evict as many blocks as are needed, copy a shared block before it is written, and let the memory grow."""
        num_beside = self.memory.num_missing(request_id, num_tokens)
        self.prefixes.prepare(table, num_tokens, self.copy, num_beside)
        if num_tokens > len(table.blocks) * self.allocator.block_size:
            self.memory.grow(request_id, num_tokens)

    def chunk_end(self, request_id: str, start: int, stop: int) -> int:
        """Ask the memory."""
        return self.memory.chunk_end(request_id, start, stop)

    def announce_truncation(self, request_id: str, num_tokens: int) -> None:
        """Tell the memory: these tokens are drafts (lesson 14)."""
        self.memory.announce_drafts(request_id, num_tokens)

    def commit(self, request_id: str, table: RequestTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Share whole blocks from now on, keep the memory where that is worthwhile, and save both elsewhere."""
        is_worth = self.memory.commit(request_id, num_computed)
        stored = self.prefixes.commit(table, token_ids, num_computed, is_worth)
        if stored is not None:
            is_kept = is_worth and len(stored.blocks) * self.allocator.block_size == num_computed
            if is_kept:
                self.memory.keep(request_id, table)
            self._ask(None, self.connector.save_kv, request_id, stored, is_kept)
        self.memory.settle(request_id)

    def truncate(self, request_id: str, table: RequestTable, num_tokens: int) -> None:
        """Truncate memory and table; the cached prefix that the table uses may become shorter."""
        self.memory.truncate(request_id, num_tokens)
        table.truncate(num_tokens)
        self.prefixes.truncate(table)

    def end(self, request_id: str, table: RequestTable | None, computed_ids: Sequence[int]) -> None:
        """Keep a request's whole blocks in the cache, and free the rest: each part, whatever another one raises.

        An error of the connector is only logged, because it holds only copies.
        """
        with ExitStack() as parts:  # calls each of them, the last one first, even if another one raises
            if table is not None:
                parts.callback(self._end, request_id, table, computed_ids)
            elif (request := self.requests.get(request_id)) is not None and request.session is not None:
                parts.callback(self.prefixes.tree.policy.gave_up, request.session, request.namespace)
            parts.callback(self._ask, None, self.connector.request_finished, request_id)

    def _end(self, request_id: str, table: RequestTable, computed_ids: Sequence[int] = ()) -> None:
        with ExitStack() as parts:
            parts.callback(table.free)
            parts.callback(self.memory.free, request_id)
            parts.callback(self._keep, request_id, table, computed_ids)

    def _keep(self, request_id: str, table: RequestTable, computed_ids: Sequence[int]) -> None:
        """Leave the request's whole blocks to the prefix cache, and copies of them to the connector."""
        if stored := self.prefixes.release(table, computed_ids):
            self._ask(None, self.connector.save_kv, request_id, stored, False)

    def _ask(self, default: AnswerT, method: Callable[..., AnswerT], *arguments: Any) -> AnswerT:
        """Return the connector's answer. If it fails, log that and return `default`: no block depends on it."""
        try:
            return method(*arguments)
        except (EngineDead, NotImplementedError):
            raise
        except Exception:
            name = getattr(method, "__name__", method)
            log.exception("the connector failed, as if it had nothing: %s of %s", name, arguments[0])
            return default

    def clear(self) -> None:
        """Give up all cached prefixes."""
        self.prefixes.clear()

    def close_session(self, session: Hashable, namespace: Hashable) -> bool:
        """Tell the policy that the session has no next turn.

        Its requests that still wait, or begin again after a preemption, would open it again, so they are forgotten.
        """
        for request_id, request in list(self.requests.items()):
            if (request.session, request.namespace) == (session, namespace):
                del self.requests[request_id]
        return self.prefixes.tree.policy.close(session, namespace)

    def close(self) -> None:
        """Shut the connector down, and close the watcher even if that fails."""
        with ExitStack() as parts:
            parts.callback(self.prefixes.watcher.close)
            parts.callback(self.connector.shutdown)


def caching_manager(
    num_blocks: int,
    block_size: int = 16,
    copy: CopyBlocks = no_store,
    capacity: int | None = None,
    policy: EvictionPolicy | None = None,
) -> KvCacheManager:
    """Return lesson 5's manager with a PrefixCache; the arguments are theirs."""
    cache = partial(PrefixCache, capacity=capacity, policy=policy)
    return coordinated(num_blocks, block_size, copy, prefixes=cache)


def cache_of(manager: KvCacheManager) -> CacheCoordinator:
    """Return the CacheCoordinator of a manager made by `coordinated`."""
    assert isinstance(manager.coordinator, CacheCoordinator)
    return manager.coordinator


def coordinated(num_blocks: int, block_size: int = 16, copy: CopyBlocks = no_store, **parts: Any) -> KvCacheManager:
    """Return lesson 5's manager with a CacheCoordinator of these parts."""
    return KvCacheManager(num_blocks, block_size, copy, partial(CacheCoordinator, **parts))
