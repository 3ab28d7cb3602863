"""Lesson 19. The receiver's connector: prompts are computed by other processes, and their K and V come from buffers.

A request that is about to be admitted is asked for, and stays in its place in the queue while its K and V are on their
way: other requests go on, and what it needs of the pool is set aside. Then it begins behind them, as if a cache had had
them. Whatever goes wrong, it begins with what has arrived, and computes the rest here.
"""

import time
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from mini_engine.handover.extras import ExtraBuffers
from mini_engine.handover.protocol import Ask, Cancel
from mini_engine.handover.stage import Stage, State
from mini_engine.handover.transfers import Transfer, Transfers
from mini_engine.kv.connector import NO_MATCH, NOTHING, KvConnector, Load, Matched, Text, TierStats
from mini_engine.kv.radix_node import key_of
from mini_engine.kv.request_table import RequestTable
from mini_engine.tiers.store import Blocks

WAIT_SECONDS = 0.01  # for news, where no other request runs; an abort waits as long
EVENTS = ("transfers", "tokens", "bytes", "milliseconds", "cancelled", "fallbacks", "losses")


Key = tuple[Hashable, bytes]


class Senders(Protocol):
    """The processes that compute prompts: `PrefillWorkers`.

    num_losses: senders that have died, or had to be killed, so far. num_away: those missing now: lost, not replaced.
    """

    @property
    def num_losses(self) -> int: ...

    @property
    def num_away(self) -> int: ...

    def choose(self, tokens: array, namespace: Hashable) -> int | None:
        """Return the number of the sender that a prompt should go to; None if there is none now."""
        ...

    def send(self, sender: int, message: Ask | Cancel) -> None:
        """Send a message. Does nothing if the sender is lost: its transfers are ended then."""

    def close(self) -> None:
        """End all senders."""


class ReceivingConnector(KvConnector):
    """Connects an engine's manager to senders.

    Args:
        senders: they compute prompts. transfers: the account of what they were lent. stage: the buffers.
        blocks: copies the pool's blocks, of `block_size` tokens. extras: what comes with them.
        min_tokens: prompts with fewer tokens to hand over are computed here.

    Attributes:
        asked: by namespace and text, the transfer of what waits; None where it has been decided to compute it here.
        taken: the transfer of each request that is being admitted.
        requests: those that may wait, as long as their callers have them.
    """

    def __init__(
        self,
        senders: Senders,
        transfers: Transfers,
        stage: Stage,
        blocks: Blocks,
        block_size: int,
        extras: ExtraBuffers,
        min_tokens: int,
    ) -> None:
        self.senders, self.transfers, self.stage = senders, transfers, stage
        self.blocks, self.block_size, self.extras = blocks, block_size, extras
        self.min_tokens = min_tokens
        self.asked: dict[Key, Transfer | None] = {}
        self.taken: dict[str, Transfer] = {}
        self.requests: WeakValueDictionary[str, Text] = WeakValueDictionary()
        self.events: Counter[str] = Counter()

    @property
    def stats(self) -> Sequence[TierStats]:
        """Counts of transfers and bytes, and of fallbacks: prompts computed here although a sender had been asked."""
        self.events["losses"] = self.senders.num_losses
        states = self.transfers.buffers.states
        num_bytes = (len(states) - states.count(State.FREE)) * self.stage.buffer_bytes
        events = {name: self.events[name] for name in EVENTS}
        return [TierStats("prefill", num_bytes, events, {"workers_away": self.senders.num_away})]

    def request_added(self, request: Text) -> None:
        """Remember the request: if it ends while its text is on its way, that is cancelled."""
        self.requests[request.id] = request

    def has_asked(self, token_ids: Sequence[int], namespace: Hashable) -> bool:
        """Return True if this text has been asked for and not yet been taken."""
        return self.asked.get((namespace, key_of(token_ids))) is not None

    def get_num_new_matched_tokens(
        self, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Matched:
        """Ask a sender for the prompt, the first time; then say how much of it has arrived."""
        key = namespace, key_of(token_ids)
        if key not in self.asked:
            self._ask(key, token_ids, num_computed_tokens // self.block_size)
        if key not in self.asked:  # all buffers are in use, and some of them will come back
            return self._waiting(may_wait)
        transfer = self.asked[key]
        if transfer is None:
            return NO_MATCH
        if transfer.is_open and may_wait:
            self.transfers.wait(WAIT_SECONDS)
        if transfer.is_open:
            return Matched((transfer.stop - transfer.start) * self.block_size, load_async=True)
        return Matched(self._usable(transfer, num_computed_tokens).num_tokens)

    def start_load_kv(
        self, request_id: str, token_ids: Sequence[int], namespace: Hashable, num_computed_tokens: int, may_wait: bool
    ) -> Load:
        """Return the blocks of the prompt that have arrived. From now on the transfer belongs to this request."""
        transfer = self.asked.pop((namespace, key_of(token_ids)), None)
        if transfer is None:
            return NOTHING
        self.taken[request_id] = transfer
        load = self._usable(transfer, num_computed_tokens)
        self.events["milliseconds"] += round(1000 * (time.monotonic() - transfer.asked_at))
        self.events["fallbacks"] += num_computed_tokens + load.num_tokens < transfer.stop * self.block_size
        return load

    def update_state_after_alloc(self, request_id: str, table: RequestTable, num_computed_tokens: int) -> None:
        """Give back the request's buffers: what was in them has been copied, or could not be used."""
        transfer = self.taken.pop(request_id, None)
        if transfer is not None:
            self._give_back(transfer)

    def request_finished(self, request_id: str) -> None:
        """Cancel what the request waited for. If another one waits for the same text, that will be asked for again."""
        request = self.requests.get(request_id)
        if request is None:
            return
        transfer = self.asked.pop((request.namespace, key_of(request.token_ids)), None)
        if transfer is not None:
            self._give_back(transfer)

    def shutdown(self) -> None:
        """End all senders."""
        self.senders.close()

    def _ask(self, key: Key, token_ids: Sequence[int], start: int) -> None:
        """Ask for a prompt's blocks from `start` on, or decide to compute them here: set `asked[key]`.

        It is left unset where that must be decided later.
        """
        namespace, _ = key
        stop = self._stop(start, (len(token_ids) - 1) // self.block_size)  # the last token is computed here
        too_short = (stop - start) * self.block_size < max(1, self.min_tokens)
        if too_short or not isinstance(namespace, str | int | None):
            self.asked[key] = None
            return
        tokens = array("i", token_ids[: stop * self.block_size + 1])
        sender = self.senders.choose(tokens, namespace)
        num_extra = self.extras.num_buffers(start, stop)
        transfer = None if sender is None else self.transfers.ask(sender, start, stop, num_extra)
        if transfer is not None:
            self.asked[key] = transfer
            self.senders.send(transfer.sender, Ask(transfer.id, tokens, namespace, start, stop, transfer.buffers))
        elif sender is None or not self.transfers.any_lent:  # full buffers could wait for this request for ever
            self.asked[key] = None
            self.events["fallbacks"] += 1

    def _give_back(self, transfer: Transfer) -> None:
        """Give up a transfer; if it is still on its way, tell the sender."""
        if not transfer.is_open:
            self.transfers.take(transfer)
            return
        self.events["cancelled"] += 1
        if self.transfers.cancel(transfer):
            self.senders.send(transfer.sender, Cancel(transfer.id))

    def _stop(self, start: int, stop: int) -> int:
        """Return up to which block a prompt is handed over: all of it, or as much as fits into the stage."""
        while stop > start and stop - start + self.extras.num_buffers(start, stop) > self.stage.num_buffers:
            stop -= 1
        return stop

    def _waiting(self, may_wait: bool) -> Matched:
        """Wait for free buffers: those that are lent come back."""
        if may_wait:
            self.transfers.wait(WAIT_SECONDS)
        return Matched(0, load_async=True)

    def _usable(self, transfer: Transfer, num_computed_tokens: int) -> "ArrivedBlocks":
        """Return the usable blocks of a transfer, after the tokens that the pool has now.

        It may have more than when the transfer was asked for, or less. Without its extras, none of it can be used.
        """
        first = num_computed_tokens // self.block_size
        num_extra = len(transfer.buffers) - (transfer.stop - transfer.start)
        stop = min(transfer.stop, transfer.start + transfer.num_filled)
        if first < transfer.start or first >= stop or (num_extra and not transfer.is_whole):
            stop = first
        return ArrivedBlocks(transfer, first, stop, self)


@dataclass(frozen=True)
class ArrivedBlocks(Load):
    """Blocks start … stop - 1 of a transfer, and its extras."""

    transfer: Transfer
    start: int
    stop: int
    connector: ReceivingConnector

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the blocks."""
        return (self.stop - self.start) * self.connector.block_size

    def into(self, request_id: str, blocks: Sequence[int]) -> None:
        """Copy the buffers into these blocks, and the extras to where the request needs them."""
        transfer, connector = self.transfer, self.connector
        begin, num_blocks = self.start - transfer.start, transfer.stop - transfer.start
        buffers = [connector.stage.read(buffer) for buffer in transfer.buffers]
        mine, extras = buffers[begin : begin + self.stop - self.start], buffers[num_blocks:]
        connector.blocks.write(list(blocks[: self.stop - self.start]), mine)
        if extras:
            connector.extras.write(request_id, self.start, self.stop, extras)
        num_bytes = (len(mine) + len(extras)) * connector.stage.buffer_bytes
        connector.events.update(transfers=1, tokens=self.num_tokens, bytes=num_bytes)
