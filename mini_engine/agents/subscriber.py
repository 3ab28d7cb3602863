"""Lesson 20. Follows the events of replicas over ZeroMQ, and keeps an index of their blocks up to date.

Messages get lost: those from before the connection, all of a slow reader's, and any while a connection is down. Numbers
show it, and the publisher's ROUTER socket sends them again, or a snapshot.
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic

from mini_engine.agents.events import EventBatch
from mini_engine.agents.index import BlockIndex
from mini_engine.agents.publisher import HIGH_WATER_MARK, NUMBER_BYTES, TOPIC
from mini_engine.agents.wire import decode, libraries
from mini_engine.distributed.routing.policy import ReplicaT

PATIENCE = 2.0  # seconds to wait for a replay
MOST_HELD = 1000

log = logging.getLogger(__name__)


class Subscriber(Generic[ReplicaT]):
    """Follows one replica. `read` must be called again and again, by one thread.

    Args:
        index: to keep up to date. replica: its name there. endpoint: where it publishes.
        replay: where it replays; without it, a gap costs everything known of the replica.
        clock: seconds.

    Attributes:
        num_gaps: how often batches were missing. num_forgotten: how often they could not be had again.
        held: batches that came while earlier ones were missing.
    """

    def __init__(
        self,
        index: BlockIndex[ReplicaT],
        replica: ReplicaT,
        endpoint: str,
        replay: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.zmq, _ = libraries()
        self.index, self.replica, self.clock = index, replica, clock
        self.num_gaps = self.num_forgotten = 0
        self.held: deque[tuple[int, EventBatch]] = deque(maxlen=MOST_HELD)
        self.asked_at: float | None = None
        self.context = self.zmq.Context()
        self.sub = self.context.socket(self.zmq.SUB)
        self.sub.set_hwm(HIGH_WATER_MARK)
        self.sub.setsockopt(self.zmq.SUBSCRIBE, TOPIC)
        self.sub.connect(endpoint)
        self.poller = self.zmq.Poller()
        self.poller.register(self.sub, self.zmq.POLLIN)
        self.dealer: Any = None
        if replay is not None:  # REQ would deliver the first of the answers only
            self.dealer = self.context.socket(self.zmq.DEALER)
            self.dealer.connect(replay)
            self.poller.register(self.dealer, self.zmq.POLLIN)
        self.close_sockets = weakref.finalize(self, shut, self.context, self.sub, self.dealer)
        if replay is not None:
            self._ask(0)

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self.close_sockets()

    def follow(self, stopping: threading.Event) -> None:
        """Read until `stopping` is set: the body of a thread."""
        while not stopping.is_set():
            self.read(0.1)

    def read(self, seconds: float) -> int:
        """Apply what has come; wait at most so long for the first message. Return the number of messages."""
        count = 0
        ready = dict(self.poller.poll(int(seconds * 1000)))
        while ready:
            for socket in ready:
                self._receive(socket.recv_multipart(), socket is self.dealer)
                count += 1
            ready = dict(self.poller.poll(0))
        if self.asked_at is not None and self.clock() > self.asked_at + PATIENCE:
            self._settle()
        return count

    def _receive(self, frames: list[bytes], is_replay: bool) -> None:
        """Apply a message, or hold it. One that cannot be read is left out: its number will be missing."""
        if is_replay and not frames[-1]:
            self._settle()
            return
        try:
            number, batch = int.from_bytes(frames[-2], "big"), decode(frames[-1])
        except (ValueError, IndexError):
            log.exception("a message of %s could not be read", self.replica)
            return
        if self.asked_at is not None and not is_replay:
            self.held.append((number, batch))
        elif (missing := self.index.apply(self.replica, number, batch)) is not None:
            self._gap(missing, number, batch)

    def _gap(self, missing: int, number: int, batch: EventBatch) -> None:
        """Ask for what is missing, or go on without it."""
        self.num_gaps += 1
        if self.dealer is None or self.asked_at is not None:
            self._forget(number, batch)
            return
        self.held.append((number, batch))
        self._ask(missing)

    def _ask(self, number: int) -> None:
        self.asked_at = self.clock()
        self.dealer.send_multipart([b"", number.to_bytes(NUMBER_BYTES, "big")])

    def _settle(self) -> None:
        """Apply what was held during a replay, which has ended or never came."""
        self.asked_at = None
        held, self.held = self.held, deque(maxlen=MOST_HELD)
        for number, batch in held:
            if self.index.apply(self.replica, number, batch) is not None:
                self._forget(number, batch)

    def _forget(self, number: int, batch: EventBatch) -> None:
        self.num_forgotten += 1
        self.index.forget(self.replica, number, batch.publisher_id)
        self.index.apply(self.replica, number, batch)


def shut(context: Any, *sockets: Any) -> None:
    """Close the sockets, then their context. A context that Python collects first would wait for them for ever."""
    for socket in sockets:
        if socket is not None:
            socket.close(linger=0)
    context.term()
