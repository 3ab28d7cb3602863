"""Lesson 8. The seam for other places where KV may be. Here there are none: KV is in the pool, or nowhere.

Two sides, divided and named as in vLLM's KVConnectorBase_V1. The scheduler's side is asked with numbers, before a
request is admitted and when it ends; the worker's side moves bytes.
"""

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from mini_engine.kv.prefixes import Stored
from mini_engine.kv.request_table import RequestTable


class TierStats(NamedTuple):
    """Statistics of a place below the pool, since the start.

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
    """KV that follows a prompt's first tokens: of `num_tokens` tokens. load_async: it is on its way, so wait a step."""

    num_tokens: int = 0
    load_async: bool = False


class Load:
    """KV that a connector has found: `num_tokens` tokens, whole blocks. Here none."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return 0

    def into(self, request_id: str, blocks: Sequence[int]) -> None:
        """Write it into these blocks, and what goes with it into the request's memory."""


class Text(Protocol):
    """A request as coordinators see it: lesson 5's Request. token_ids: all that are known now."""

    id: str
    namespace: Hashable
    session: Hashable

    @property
    def token_ids(self) -> Sequence[int]: ...


NO_MATCH = Matched()
NOTHING = Load()


class KvConnector:
    """A connector that finds and saves nothing.

    Its errors, apart from EngineDead, are logged: no block of the pool depends on it, so a failure is a miss.
    """

    @property
    def stats(self) -> Sequence[TierStats]:
        """Statistics of each place."""
        return ()

    # ---------------------------------------------------------------- the scheduler's side

    def request_added(self, request: Text) -> None:
        """Note that a request waits from now on. It may wait again later, with more tokens."""

    def get_num_new_matched_tokens(
        self, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Matched:
        """Return how many tokens of KV follow the first `num_computed_tokens`. Polled each step while a request waits.

        Args:
            num_computed_tokens: the first tokens, which the pool has.
            may_wait: no other request runs, so the connector may wait a moment before it answers.
        """
        return NO_MATCH

    def update_state_after_alloc(self, request_id: str, table: RequestTable, num_computed_tokens: int) -> None:
        """Note that the request has been admitted: its table has blocks with KV of its first tokens."""

    def request_finished(self, request_id: str) -> None:
        """Note that the request has given up its place, whether it ran or waited: nothing is needed for it now."""

    # ---------------------------------------------------------------- the worker's side

    def start_load_kv(
        self, request_id: str, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Load:
        """Return the KV that is at hand after the first tokens; the arguments are as above."""
        return NOTHING

    def save_kv(self, request_id: str, stored: Stored, is_kept: bool) -> None:
        """Save blocks that the prefix cache has taken.

        Args:
            is_kept: the request's memory is at the end of these blocks, and worth saving with them.
        """

    def shutdown(self) -> None:
        """Give up what the connector holds outside the pool: threads, processes. Idempotent."""


NO_CONNECTOR = KvConnector()
