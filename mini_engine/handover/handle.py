"""Lesson 19. One prefill worker, as its receiver sees it: a process, a pipe to it, and signs of life."""

import threading
from multiprocessing.context import SpawnContext
from queue import SimpleQueue
from typing import ClassVar

from mini_engine.errors import UserError
from mini_engine.handover.prefill import Seat, work
from mini_engine.handover.protocol import Ask, Cancel, Close, Failed, Layout, Message, packed, unpacked
from mini_engine.ranks.others import PRINTED, ctrl_c_ignored
from mini_engine.ranks.pulse import TICK_SECONDS, Pulse, bytes_for


class Handle:
    """A worker's process, from its start on.

    Args:
        number: which it is; messages to it and its transfers have it.

    Attributes:
        is_lost: set by the first that notices its end. num_held: blocks that its requests held when it last said so.
    """

    PULSE_BYTES: ClassVar[int] = bytes_for(2)

    def __init__(self, number: int, seat: Seat, context: SpawnContext) -> None:
        self.number, self.is_lost, self.num_held = number, False, 0
        self.pulse = Pulse(0, 2, seat.pulse)
        self.outbox: SimpleQueue[Message | None] = SimpleQueue()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(seat, theirs), name=f"prefill-{number}", daemon=True)
        with ctrl_c_ignored():
            self.process.start()
        theirs.close()  # or the process's end would not end the pipe
        threading.Thread(target=self._send_all, name=f"to-prefill-{number}", daemon=True).start()

    def shake_hands(self, ours: Layout) -> None:
        """Wait until the worker is ready. Raises UserError if it cannot start, or is not like this process."""
        theirs = self._first_words()
        if isinstance(theirs, Failed):
            raise UserError(f"a prefill worker cannot start: {theirs.why}", param="prefill_workers")
        assert isinstance(theirs, Layout)
        if unlike := ours.differs(theirs):
            raise UserError(
                f"a prefill worker's K and V would not fit: {unlike}; give both processes one checkpoint and the same "
                "options",
                param="prefill_workers",
            )

    def _first_words(self) -> Message:
        """Wait for the worker's first message, as long as it gives signs of life."""
        try:
            while not self.pipe.poll(TICK_SECONDS):
                if seconds := self.seconds_silent():
                    return Failed(f"it gave no sign of life for {seconds:g} s")
            return self.receive()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            return Failed(f"it ended before it was ready, with exit code {code}" + (PRINTED if code > 0 else ""))

    def receive(self) -> Message:
        """Wait for the worker's next message. EOFError, OSError: it has ended."""
        return unpacked(self.pipe.recv_bytes())

    def send(self, message: Ask | Cancel | Close) -> None:
        """Send a message without waiting: a worker that is stopped does not read."""
        self.outbox.put(message)

    def seconds_silent(self) -> float:
        """Give a sign of life. Return for how long the worker has given none, if that is too long, otherwise 0."""
        self.pulse.tick()
        pid = self.process.pid
        return self.pulse.seconds_lost(1, pid) if pid is not None else 0.0

    def kill(self) -> None:
        """End the process, whatever it does, and wait until it is gone."""
        self.outbox.put(None)
        self.process.kill()
        self.process.join()

    def _send_all(self) -> None:
        try:
            while (message := self.outbox.get()) is not None:
                self.pipe.send_bytes(packed(message))
        except OSError:
            return  # its end is noticed where it is heard
