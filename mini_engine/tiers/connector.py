"""Lesson 12. Tiers behind the prefix cache of lesson 8: evicted prefixes come back instead of being computed again.

A block goes to the tiers when it enters the tree, so evicting it later costs nothing, and preempting a request neither:
what it has computed is in the tree, and in a tier. A request begins with the prefix that the tree has, and goes on with
what the tiers have behind it, copied into blocks that the tree then holds.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from mini_engine.kv.connector import NOTHING, KvConnector, Load, Matched, Text, TierStats
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.radix_node import TOKEN_BYTES, key_of
from mini_engine.tiers.companions import Companion, CompanionRecords
from mini_engine.tiers.records import Kind, Record, Wanted
from mini_engine.tiers.store import BlockStore, Prefix


@dataclass(frozen=True)
class TierLoad(Load):
    """Records of blocks that follow one another, from index `start` on; `records` has those of companions, too."""

    start: int
    blocks: Sequence[Record]
    records: Sequence[Record]
    connector: "TierConnector"

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the blocks."""
        return len(self.blocks) * self.connector.block_size

    def into(self, request_id: str, blocks: Sequence[int]) -> None:
        """Copy the records into these blocks, and the companions to where the request needs them."""
        self.connector.block_store.restore(self.blocks, blocks)
        self.connector.companions.write(request_id, self.start, self.start + len(self.blocks), self.records)


class TierConnector(KvConnector):
    """Connects a manager's coordinator to tiers.

    Args:
        block_store: the tiers.
        companions: what comes and goes with the blocks; nothing for a model with K and V alone.
        prefers_sessions: host memory drops the texts of sessions after the others (lesson 20).
    """

    def __init__(
        self, block_store: BlockStore, companions: Sequence[Companion] = (), prefers_sessions: bool = False
    ) -> None:
        self.block_store, self.companions = block_store, CompanionRecords(block_store.tiers, companions)
        self.prefers_sessions = prefers_sessions
        self.turns: WeakValueDictionary[str, Text] = WeakValueDictionary()  # requests of sessions
        self.block_size = block_store.identity.block_size

    @property
    def stats(self) -> Sequence[TierStats]:
        """Statistics of host memory and of the disk, if there is one."""
        return self.block_store.tiers.stats()

    def request_added(self, request: Text) -> None:
        """Remember whether it is a turn of a session."""
        if self.prefers_sessions and request.session is not None:
            self.turns[request.id] = request

    def get_num_new_matched_tokens(
        self, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Matched:
        """Return how many tokens the tiers have after the first ones. Records on the disk are now being read ahead.

        With `may_wait` nothing is read ahead: no other request can run meanwhile, so `start_load_kv` reads the disk.
        """
        prefix = self._prefix(key_of(token_ids), namespace)
        wanted = self._wanted(prefix, num_computed_tokens, len(token_ids))
        num_tokens = self.block_size * sum(one.kind is Kind.KV for one in wanted)
        return Matched(num_tokens, not may_wait and self.block_store.tiers.prefetch(wanted))

    def start_load_kv(
        self, request_id: str, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Load:
        """Return the records behind the first tokens. With `may_wait`, the disk is read for them."""
        prefix = self._prefix(key_of(token_ids), namespace)
        wanted = self._wanted(prefix, num_computed_tokens, len(token_ids))
        records = self.block_store.find(wanted, read_disk=may_wait)
        num_asked = sum(one.kind is Kind.KV for one in wanted)
        num_missing = self._stop(prefix, len(token_ids)) - num_computed_tokens // self.block_size - num_asked
        self.block_store.tiers.num_missing += max(0, num_missing)
        useful = self.companions.useful(wanted, records)
        blocks = [record for record in useful if record.kind is Kind.KV]
        return TierLoad(num_computed_tokens // self.block_size, blocks, useful, self) if useful else NOTHING

    def save_kv(self, request_id: str, stored: Stored, is_kept: bool) -> None:
        """Hand new blocks to the tiers, and what goes with them. Host memory prefers a session's whole text."""
        prefix = self._prefix(stored.key, stored.namespace)
        companions = self.companions.new(request_id, prefix, stored.start, len(stored.blocks), is_kept)
        self.block_store.save(prefix, stored.blocks, stored.start, companions)
        if request_id in self.turns:
            self.block_store.tiers.host.prefer(self.companions.keys(prefix))

    def shutdown(self) -> None:
        """Write what is waiting, and end the tiers' threads."""
        self.block_store.tiers.close()

    def _prefix(self, key: bytes, namespace: Hashable) -> Prefix:
        return self.block_store.prefix(key, namespace, self.block_size * TOKEN_BYTES)

    def _stop(self, prefix: Prefix, num_tokens: int) -> int:
        """Return how many blocks of a prompt may come from the tiers. Its last token is left out: it is computed."""
        return min(len(prefix), (num_tokens - 1) // self.block_size)

    def _wanted(self, prefix: Prefix, num_found: int, num_tokens: int) -> list[Wanted]:
        """Return the records to ask the tiers for, after the first `num_found` tokens of a prompt."""
        start = num_found // self.block_size
        blocks = self.block_store.wanted(prefix, start, self._stop(prefix, num_tokens))
        return self.companions.wanted(prefix, start, blocks)
