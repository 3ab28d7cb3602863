"""Lesson 19. One prefill worker, as its receiver sees it: a process, a pipe to it, and heartbeats."""

import threading
from multiprocessing.context import SpawnContext
from queue import SimpleQueue

from mini_engine.base.errors import UserError
from mini_engine.distributed.tensor_parallel.others import PRINTED, ctrl_c_ignored
from mini_engine.distributed.tensor_parallel.pulse import TICK_SECONDS, Pulse
from mini_engine.handover.prefill import Seat, work
from mini_engine.handover.protocol import Ask, Cancel, Close, Failed, Layout, Message


class Handle:
    """A worker's process, from its start.

    Args:
        number: identifies the worker in messages and transfers.

    Attributes:
        is_lost: set by the first to notice its end. num_held: blocks that its requests held, as last reported.
    """

    def __init__(self, number: int, seat: Seat, context: SpawnContext) -> None:
        self.number, self.is_lost, self.num_held = number, False, 0
        self.pulse = Pulse(0, 2, seat.pulse)
        self.outbox: SimpleQueue[Message | None] = SimpleQueue()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(seat, theirs), name=f"prefill-{number}", daemon=True)
        with ctrl_c_ignored():
            self.process.start()
        theirs.close()  # otherwise the pipe would outlive the process
        threading.Thread(target=self._send_all, name=f"to-prefill-{number}", daemon=True).start()

    def shake_hands(self, ours: Layout) -> None:
        """Wait until the worker is ready. Raises UserError if it cannot start or its layout differs from ours."""
        theirs = self._first_words()
        if isinstance(theirs, Failed):
            raise UserError(f"a prefill worker cannot start: {theirs.why}", param="prefill_workers")
        assert isinstance(theirs, Layout)
        if unlike := ours.differs(theirs):
            raise UserError(
                f"a prefill worker's K and V would not fit: {unlike}; give both processes the same checkpoint and "
                "options",
                param="prefill_workers",
            )

    def _first_words(self) -> Message:
        """Wait for the worker's first message as long as its heartbeat goes on."""
        try:
            while not self.pipe.poll(TICK_SECONDS):
                if seconds := self.seconds_silent():
                    return Failed(f"it sent no heartbeat for {seconds:g} s")
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            return Failed(f"it ended before it was ready, with exit code {code}" + (PRINTED if code > 0 else ""))

    def send(self, message: Ask | Cancel | Close) -> None:
        """Send a message without waiting: a stopped worker does not read."""
        self.outbox.put(message)

    def seconds_silent(self) -> float:
        """Send a heartbeat. Return the seconds since the worker's last one if they exceed the limit, otherwise 0."""
        self.pulse.tick()
        pid = self.process.pid
        return self.pulse.seconds_lost(1, pid) if pid is not None else 0.0

    def kill(self) -> None:
        """Kill the process, whatever it is doing, and wait until it is gone."""
        self.outbox.put(None)
        self.process.kill()
        self.process.join()

    def _send_all(self) -> None:
        try:
            while (message := self.outbox.get()) is not None:
                self.pipe.send(message)
        except OSError:
            return  # the thread that reads from it notices its end
