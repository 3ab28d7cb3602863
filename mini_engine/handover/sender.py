"""Lesson 19. The sender's connector: what a prefill engine computes goes into the receiver's buffers, chunk by chunk.

A chunk's blocks enter the prefix cache as soon as they are full; the manager says so (`save_kv`), and they are copied
then, while the rest of the prompt has yet to be computed. Blocks that the cache had already are copied when the request
is admitted. So the pool's own blocks can be freed, evicted or preempted as ever: the buffers have what was asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mini_engine.handover.extras import ExtraBuffers
from mini_engine.handover.protocol import Ask, Ended, Filled
from mini_engine.handover.stage import Stage
from mini_engine.kv.connector import KvConnector
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.request_table import RequestTable
from mini_engine.tiers.records import Bytes
from mini_engine.tiers.store import Blocks


@dataclass
class Sending:
    """A transfer of which the first `num_filled` buffers are complete."""

    ask: Ask
    num_filled: int = 0

    @property
    def next_block(self) -> int:
        """The index of the first block that has not been copied."""
        return min(self.ask.stop, self.ask.start + self.num_filled)

    @property
    def is_whole(self) -> bool:
        """True if everything has been copied."""
        return self.num_filled == len(self.ask.buffers)


class SendingConnector(KvConnector):
    """Connects a prefill engine's manager to buffers of another process. Requests have the ids of their transfers.

    It finds nothing: whatever this engine needs it computes. A request that gives up its place may go on later, after a
    preemption, so only `end` ends a transfer.

    Args:
        stage: the buffers. blocks: copies the pool's blocks, of `block_size` tokens. extras: what goes with them.
        say: sends a message to the receiver.
    """

    def __init__(
        self, stage: Stage, blocks: Blocks, block_size: int, extras: ExtraBuffers, say: Callable[[Filled | Ended], None]
    ) -> None:
        self.stage, self.blocks, self.block_size = stage, blocks, block_size
        self.extras, self.say = extras, say
        self.sendings: dict[str, Sending] = {}

    def begin(self, ask: Ask) -> None:
        """Expect a request that computes what was asked for."""
        self.sendings[str(ask.id)] = Sending(ask)

    def end(self, transfer_id: int, error: str = "", num_held: int = 0) -> None:
        """Write into none of the transfer's buffers any more, and say so."""
        sending = self.sendings.pop(str(transfer_id), None)
        if sending is not None:
            missing = "" if sending.is_whole else "its end was not computed"
            self.say(Ended(transfer_id, error or missing, num_held))

    def update_state_after_alloc(self, request_id: str, table: RequestTable, num_computed_tokens: int) -> None:
        """Copy what the prefix cache had."""
        self._copy(request_id, table.blocks[: num_computed_tokens // self.block_size], at_end=True)

    def save_kv(self, request_id: str, stored: Stored, is_kept: bool) -> None:
        """Copy the blocks that have been computed since the last call."""
        self._copy(request_id, stored.blocks, is_kept)

    def _copy(self, request_id: str, blocks: Sequence[int], at_end: bool) -> None:
        """Copy what is new of a request's first blocks, and behind the last one its extras.

        Args:
            at_end: the request's memories are behind the last of `blocks`.
        """
        sending = self.sendings.get(request_id)
        if sending is None or sending.is_whole:
            return
        ask, before = sending.ask, sending.num_filled
        if new := blocks[sending.next_block : ask.stop]:
            self._fill(sending, self.blocks.read(new))
        if sending.next_block == ask.stop and len(blocks) >= ask.stop and (at_end or not self.extras.only_at_end):
            self._fill(sending, self.extras.read(request_id, ask.start, ask.stop))
        if sending.num_filled > before:
            self.say(Filled(ask.id, sending.num_filled))

    def _fill(self, sending: Sending, payloads: Sequence[Bytes]) -> None:
        for payload in payloads:
            self.stage.write(sending.ask.buffers[sending.num_filled], payload)
            sending.num_filled += 1
