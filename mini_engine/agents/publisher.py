"""Lesson 20. Publishes a prefix cache's events over ZeroMQ, in a thread of its own, as vLLM does.

    PUB      to all subscribers:    [topic, number, payload]
    ROUTER   from one subscriber:   [number], and back to it every batch from there on, then [b"", -1, b""]

The engine only appends to a log. A subscriber that is slow or not there costs it nothing: messages are dropped, the
numbers have a gap, and the subscriber asks again. Payloads contain the tokens of all prompts, and there is no
password: every program that can connect reads them.
"""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from mini_engine.agents.events import AllBlocksCleared, Event, EventBatch, EventLog
from mini_engine.agents.wire import encode, libraries
from mini_engine.base.errors import UserError, first_line
from mini_engine.kv.prefixes import Stored
from mini_engine.kv.watcher import CacheWatcher

TOPIC = b"kv-events"  # the one in vLLM's examples
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
KEPT_BATCHES = 1000
HIGH_WATER_MARK = 10_000
PERIOD = 0.02  # seconds between two batches: about a step
HEARTBEAT = 1.0
LINGER_MS = 200

log = logging.getLogger(__name__)


class Publisher(CacheWatcher):
    """The watcher of a prefix cache that others follow. Its thread ends with `close`, or when the watcher is gone.

    Args:
        block_size: tokens in a block. endpoint: of the PUB socket, such as "tcp://127.0.0.1:5557".
        replay: endpoint of the ROUTER socket; without one, nothing can be asked for again.
        form: as for `encode`.

    Raises:
        UserError: an endpoint cannot be opened, or a library is missing.
    """

    def __init__(self, block_size: int, endpoint: str, replay: str | None = None, form: str = "map") -> None:
        self.events = EventLog(block_size)
        sender = self.sender = Sender(self.events, endpoint, replay, form)
        sender.thread.start()
        self.close_sender = weakref.finalize(self, sender.close)

    def stored(self, stored: Stored) -> None:
        """Pass it on to the log."""
        self.events.stored(stored)

    def removed(self, blocks: Sequence[int]) -> None:
        """Pass it on to the log."""
        self.events.removed(blocks)

    def cleared(self) -> None:
        """Pass it on to the log."""
        self.events.cleared()

    def close(self) -> None:
        """Send what waits, and close both sockets. Idempotent."""
        self.close_sender()


class Sender:
    """The sockets and the thread, which alone uses them. It knows the log, and not the watcher that owns both.

    Args:
        events, endpoint, replay, form: as for Publisher.
        keep: how many batches can be replayed; what is older is replaced by a snapshot.
        mark: messages that may wait for one subscriber; what is more is dropped.
        heartbeat: seconds without events until an empty batch shows subscribers that they have missed none.

    Attributes:
        endpoint, replay_endpoint: where the sockets really are, if a port was left open as "*".
        number: of the next batch. sent: the latest batches as (number, payload).
    """

    def __init__(
        self,
        events: EventLog,
        endpoint: str,
        replay: str | None = None,
        form: str = "map",
        keep: int = KEPT_BATCHES,
        mark: int = HIGH_WATER_MARK,
        heartbeat: float = HEARTBEAT,
    ) -> None:
        self.zmq, _ = libraries()
        self.events, self.form, self.heartbeat = events, form, heartbeat
        self.number, self.sent = 0, deque[tuple[int, bytes]](maxlen=keep)
        self.publisher_id = os.urandom(16)
        self.context = self.zmq.Context()
        try:
            self.pub = self._bind(self.zmq.PUB, endpoint, "kv_events", mark)
            self.router: Any = None
            if replay is not None:
                self.router = self._bind(self.zmq.ROUTER, replay, "kv_events_replay", keep + 2)
        except BaseException:
            self.context.destroy(linger=0)
            raise
        self.endpoint = self._place(self.pub)
        self.replay_endpoint = None if self.router is None else self._place(self.router)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def close(self) -> None:
        """End the thread; it sends what waits."""
        self.stopping.set()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join()

    def _bind(self, kind: int, endpoint: str, param: str, most: int) -> Any:
        """Return a socket at an endpoint. vLLM binds wildcards only, and connects elsewhere: an engine here binds."""
        socket = self.context.socket(kind)
        socket.set_hwm(most)
        try:
            socket.bind(endpoint)
        except self.zmq.ZMQError as error:
            if error.errno == self.zmq.EADDRINUSE:
                why = "which is in use; choose another port, or end what listens there"
            else:
                why = f"where nothing can listen ({first_line(error)}); give an endpoint such as tcp://127.0.0.1:5557"
            raise UserError(f"{param} is {endpoint!r}, {why}", param=param) from None
        return socket

    def _place(self, socket: Any) -> str:
        return socket.getsockopt_string(self.zmq.LAST_ENDPOINT)

    # From here on, everything runs in the thread.

    def _run(self) -> None:
        try:
            self._send([AllBlocksCleared()])  # whatever an engine had that published here before
            while not self.stopping.is_set():
                self._turn()
            self._send(self.events.take())
        finally:
            self.context.destroy(linger=LINGER_MS)

    def _turn(self) -> None:
        """Wait a period for a request, answer it, and send what has come. Survives any error: numbers show the gap."""
        try:
            if self.router is None:
                self.stopping.wait(PERIOD)
            elif self.router.poll(int(PERIOD * 1000)):
                self._replay(self.router.recv_multipart())
            events = self.events.take()
            if events or time.monotonic() > self.latest + self.heartbeat:
                self._send(events)
        except Exception:
            log.exception("events of the prefix cache were lost; subscribers will ask for them again")

    def _send(self, events: Sequence[Event]) -> None:
        """Send the next batch to all subscribers."""
        self.latest = time.monotonic()
        number, self.number = self.number, self.number + 1
        payload = self._payload(events)
        self.sent.append((number, payload))
        self.pub.send_multipart((TOPIC, number.to_bytes(NUMBER_BYTES, "big"), payload))

    def _payload(self, events: Sequence[Event]) -> bytes:
        return encode(EventBatch(time.time(), events, 0, self.publisher_id), self.form)

    def _replay(self, frames: Sequence[bytes]) -> None:
        """Answer a request: send the batches from its number on, or a snapshot in place of those that are not kept."""
        client, *_, asked = frames
        if len(frames) != 3 or len(asked) != NUMBER_BYTES:
            log.warning(
                "a request for events has frames of %s bytes; it needs a number of 8 bytes", list(map(len, frames))
            )
            return
        start = int.from_bytes(asked, "big")
        batches = [one for one in self.sent if one[0] >= start]
        if len(batches) != self.number - start:  # some are not kept, or the number is from before a restart
            events, whole = self.events.take_all()
            self._send(events)
            batches = [(self.number - 1, self._payload(whole))]
        for number, payload in batches:
            self._answer(client, TOPIC, number.to_bytes(NUMBER_BYTES, "big"), payload)
        self._answer(client, b"", END, b"")

    def _answer(self, client: bytes, *frames: bytes) -> None:
        self.router.send_multipart((client, b"", *frames))
