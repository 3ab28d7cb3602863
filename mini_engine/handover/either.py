"""Lesson 19. Tiers and prefill workers behind one manager: what the tiers have, no worker need compute."""

from collections.abc import Hashable, Sequence

from mini_engine.handover.receiver import ReceivingConnector
from mini_engine.kv.connector import NO_MATCH, KvConnector, Load, Matched, Text, TierStats
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.radix_node import TOKEN_BYTES, key_of
from mini_engine.kv.request_table import RequestTable


class EitherConnector(KvConnector):
    """Asks the tiers first. A worker is asked for a prompt if much of it is missing there; then it brings all of it.

    Args:
        tiers: lesson 12's connector. workers: this lesson's.

    Attributes:
        brought: by request, the text whose blocks a worker has just brought, and its first block; `blocks` is empty.
    """

    def __init__(self, tiers: KvConnector, workers: ReceivingConnector) -> None:
        self.tiers, self.workers = tiers, workers
        self.brought: dict[str, Stored] = {}

    @property
    def stats(self) -> Sequence[TierStats]:
        """Statistics of both."""
        return [*self.tiers.stats, *self.workers.stats]

    def request_added(self, request: Text) -> None:
        """Tell both."""
        self.tiers.request_added(request)
        self.workers.request_added(request)

    def get_num_new_matched_tokens(
        self, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Matched:
        """Match a worker's KV if it has been asked or is worth asking, otherwise the tiers'."""
        asked = token_ids, namespace, num_computed_tokens, may_wait
        if self.workers.has_asked(token_ids, namespace):
            return self.workers.get_num_new_matched_tokens(*asked)
        found = self.tiers.get_num_new_matched_tokens(*asked)
        size = self.workers.block_size
        missing = (len(token_ids) - 1) // size * size - num_computed_tokens - found.num_tokens
        if missing < max(1, self.workers.min_tokens):
            return found
        brought = self.workers.get_num_new_matched_tokens(*asked)
        return found if brought == NO_MATCH else brought

    def update_state_after_alloc(self, request_id: str, table: RequestTable, num_computed_tokens: int) -> None:
        """Tell both. What a worker has brought goes to the tiers, too, as if it had been computed here."""
        brought, num_blocks = self.brought.pop(request_id, None), num_computed_tokens // self.workers.block_size
        if brought is not None and num_blocks > brought.start:  # otherwise there was no room for it
            key = brought.key[: num_blocks * self.workers.block_size * TOKEN_BYTES]
            stored = brought._replace(key=key, blocks=table.blocks[:num_blocks])
            self.tiers.save_kv(request_id, stored, is_kept=True)  # the request's memories are behind these blocks now
        self.tiers.update_state_after_alloc(request_id, table, num_computed_tokens)
        self.workers.update_state_after_alloc(request_id, table, num_computed_tokens)

    def request_finished(self, request_id: str) -> None:
        """Tell both, and forget what it has brought."""
        self.brought.pop(request_id, None)
        try:
            self.tiers.request_finished(request_id)
        finally:
            self.workers.request_finished(request_id)

    def start_load_kv(
        self, request_id: str, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Load:
        """Return the KV that a worker has brought, or the tiers' if there is none."""
        asked = request_id, token_ids, namespace, num_computed_tokens, may_wait
        brought = self.workers.start_load_kv(*asked)
        if not brought.num_tokens:
            return self.tiers.start_load_kv(*asked)
        start = num_computed_tokens // self.workers.block_size
        self.brought[request_id] = Stored(key_of(token_ids), namespace, (), start)
        return brought

    def save_kv(self, request_id: str, stored: Stored, is_kept: bool) -> None:
        """Save in the tiers."""
        self.tiers.save_kv(request_id, stored, is_kept)

    def shutdown(self) -> None:
        """Shut down both, the second even if the first fails."""
        try:
            self.tiers.shutdown()
        finally:
            self.workers.shutdown()
