"""Lesson 19. The receiver's account of transfers: blocks requested, progress, and ownership of the buffers.

Two threads use it. The engine's asks, takes and cancels; another one reports the senders' messages. A condition
protects it and wakes the engine when it waits for news.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mini_engine.handover.stage import BrokenProtocol, Buffers, Event


@dataclass(eq=False)
class Transfer:
    """Blocks start … stop - 1 of a prompt, in transit from a sender.

    sender: its number. buffers: one for each block, then those of extras.
    num_filled: the number of leading buffers that are complete.
    owed: those that were not complete when the transfer was cancelled; the sender may still write to them.
    has_ended: the sender no longer writes to any of them. error: why, if it could not fill all.
    """

    id: int
    sender: int
    start: int
    stop: int
    buffers: Sequence[int]
    asked_at: float = field(default_factory=time.monotonic)
    num_filled: int = 0
    owed: Sequence[int] = ()
    has_ended: bool = False
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """True if everything has arrived."""
        return self.num_filled == len(self.buffers)

    @property
    def is_open(self) -> bool:
        """True if more may arrive."""
        return not self.is_whole and not self.has_ended


class Transfers:
    """All transfers over one stage.

    Attributes:
        buffers: the owner of each buffer. of_id: the transfers that have buffers.
        news: notified at each message and at the loss of a sender.
    """

    def __init__(self, num_buffers: int) -> None:
        self.buffers = Buffers(num_buffers)
        self.of_id: dict[int, Transfer] = {}
        self.news = threading.Condition()
        self._last_id = 0

    def ask(self, sender: int, start: int, stop: int, num_extra: int) -> Transfer | None:
        """Lend a sender buffers for a new transfer. If there are too few, lend none and return None."""
        with self.news:
            buffers = self.buffers.lend(stop - start + num_extra)
            if buffers is None:
                return None
            self._last_id += 1
            transfer = self.of_id[self._last_id] = Transfer(self._last_id, sender, start, stop, buffers)
            return transfer

    def fill(self, sender: int, transfer_id: int, num_buffers: int) -> None:
        """Note that the sender reports the first `num_buffers` buffers of a transfer as complete.

        Raises:
            BrokenProtocol: the sender was not lent them, or has ended the transfer.
        """
        with self.news:
            transfer = self._of_sender(sender, transfer_id)
            if transfer is None or not 0 <= num_buffers <= len(transfer.buffers):
                raise BrokenProtocol(
                    f"sender {sender} has filled buffers of transfer {transfer_id}, which it was not lent"
                )
            self.buffers.happen(Event.FILL, transfer.buffers[transfer.num_filled : num_buffers])
            transfer.num_filled = max(transfer.num_filled, num_buffers)
            self.news.notify_all()

    def end(self, sender: int, transfer_id: int, error: str = "") -> None:
        """Note that the sender reports that it no longer writes to a transfer's buffers.

        Raises:
            BrokenProtocol: it has said so before; the buffers may be another transfer's now.
        """
        with self.news:
            transfer = self._of_sender(sender, transfer_id)
            if transfer is not None:  # otherwise it was complete and has been taken
                self._end(transfer, Event.END, error)
            self.news.notify_all()

    def lose(self, sender: int, why: str) -> int:
        """Note that a sender is dead. Return the number of its transfers that will stay incomplete."""
        with self.news:
            lost = [one for one in self.of_id.values() if one.sender == sender and not one.has_ended]
            for transfer in lost:
                self._end(transfer, Event.LOSE, why)
            self.news.notify_all()
            return sum(not transfer.is_whole and not transfer.owed for transfer in lost)

    def take(self, transfer: Transfer) -> None:
        """Free the buffers of a transfer that is no longer open: their contents have been copied."""
        with self.news:
            self.buffers.happen(Event.TAKE, transfer.buffers[: transfer.num_filled])
            del self.of_id[transfer.id]

    def cancel(self, transfer: Transfer) -> bool:
        """Cancel a transfer. Return True if the sender must be told; until it confirms, it owes the other buffers."""
        with self.news:
            self.buffers.happen(Event.CANCEL, transfer.buffers[: transfer.num_filled])
            if not transfer.is_open:
                del self.of_id[transfer.id]
                return False
            transfer.owed = self.buffers.happen(Event.CANCEL, transfer.buffers[transfer.num_filled :])
            return True

    @property
    def any_lent(self) -> bool:
        """True if a sender has buffers now."""
        with self.news:
            return any(not transfer.has_ended and not transfer.is_whole for transfer in self.of_id.values())

    def wait(self, seconds: float) -> None:
        """Wait for news, at most `seconds`."""
        with self.news:
            self.news.wait(seconds)

    def num_open(self, sender: int) -> int:
        """Return the number of transfers that the sender has not ended, cancelled ones included."""
        with self.news:
            return sum(one.sender == sender and not one.has_ended for one in self.of_id.values())

    def _of_sender(self, sender: int, transfer_id: int) -> Transfer | None:
        """Return the sender's transfer, or None if it has none with this id. Raises BrokenProtocol if it has ended."""
        transfer = self.of_id.get(transfer_id)
        if transfer is None or transfer.sender != sender:
            return None
        if transfer.has_ended:
            raise BrokenProtocol(f"sender {sender} speaks of transfer {transfer_id}, which has ended")
        return transfer

    def _end(self, transfer: Transfer, event: Event, error: str) -> None:
        self.buffers.happen(event, transfer.owed or transfer.buffers)
        transfer.has_ended, transfer.error = True, error
        if transfer.owed:
            del self.of_id[transfer.id]
