"""Lesson 19. The receiver's side of prefill workers: starts them, reads their messages, and replaces lost ones.

A worker that has died or sends no heartbeat is killed before its buffers are reused: a stopped one that woke up later
would write into them. Then its transfers end, and another worker takes its place. If that one cannot start, or soon
ends too, it is retried with growing pauses.
"""

import logging
import threading
from array import array
from collections.abc import Callable, Hashable
from contextlib import suppress

import torch
import torch.multiprocessing as mp

from mini_engine.distributed.routing.keys import block_keys
from mini_engine.distributed.routing.policy import Policy
from mini_engine.distributed.tensor_parallel.pulse import TICK_SECONDS, pulse_bytes
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock
from mini_engine.handover.handle import Handle
from mini_engine.handover.prefill import Seat
from mini_engine.handover.protocol import Ask, Cancel, Close, Ended, Filled, Layout
from mini_engine.handover.stage import BrokenProtocol
from mini_engine.handover.transfers import Transfers

MOST_LOSSES = 3  # in a row, without a complete transfer in between: from then on there is a pause before the next start
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds; each pause is twice the one before

log = logging.getLogger(__name__)


class PrefillWorkers:
    """Processes that compute prompts, all over one block of shared memory.

    As long as they run, torch's threads are divided between this process and the workers.

    Args:
        build: creates a worker's engine in its process; see `Seat.build`.
        block: the memory of the buffers.
        policy: chooses the worker for a prompt by its blocks; one of lesson 13's.

    Attributes:
        handles: the workers that take prompts, by number. A number is never reused.
    """

    def __init__(
        self, build: Callable, num_workers: int, block: SharedBlock, policy: Policy[int], block_size: int
    ) -> None:
        self.build, self.block, self.policy, self.block_size = build, block, policy, block_size
        self.num_workers = num_workers
        self.threads = torch.get_num_threads()
        self.num_threads = max(1, self.threads // (1 + num_workers))
        self.handles: dict[int, Handle] = {}
        self.leaving: dict[int, Handle] = {}
        self.layout: Layout | None = None
        self.transfers: Transfers | None = None
        self.num_losses = self.losses_in_a_row = self._last_number = 0
        self.closed = threading.Event()
        self.changing = threading.Lock()
        try:
            for _ in range(num_workers):
                handle = self._start()
                self.handles[handle.number] = handle
            torch.set_num_threads(self.num_threads)
        except BaseException:
            self.close()
            raise

    def meet(self, layout: Layout, transfers: Transfers) -> None:
        """Shake hands with all workers: wait until they are ready, and compare their layouts with this one.

        Raises:
            UserError: one cannot start or has another layout; all have been ended.
        """
        self.layout, self.transfers = layout, transfers
        try:
            for handle in self.handles.values():
                handle.shake_hands(layout)
        except BaseException:
            self.close()
            raise
        for handle in self.handles.values():
            self._listen(handle)
        threading.Thread(target=self._watch, name="prefill-pulse", daemon=True).start()

    # ---------------------------------------------------------------- called by the connector

    def choose(self, tokens: array, namespace: Hashable) -> int | None:
        """Return the number of the worker for a prompt; None if there is no worker."""
        loads = {number: float(self._account.num_open(number)) for number in list(self.handles)}
        if not loads:
            return None
        keys = block_keys(tokens, namespace, self.block_size)
        number = self.policy.choose(keys, loads)
        self.policy.sent(number, keys)
        return number

    def send(self, sender: int, message: Ask | Cancel) -> None:
        """Send a message to a worker. If the worker is lost, end its transfers instead."""
        handle = self.handles.get(sender) or self.leaving.get(sender)
        if handle is None:
            self._account.lose(sender, "the worker is gone")
        else:
            handle.send(message)

    def close(self) -> None:
        """End all workers, whatever they are doing. Idempotent."""
        self.closed.set()
        with self.changing:
            handles = [*self.handles.values(), *self.leaving.values()]
            self.handles, self.leaving = {}, {}
        for handle in handles:
            handle.kill()
        torch.set_num_threads(self.threads)

    # ---------------------------------------------------------------- a worker's life

    def replace_all(self) -> None:
        """Replace the workers one by one. Each new one is ready before an old one leaves, which first drains.

        Workers that were lost and not yet replaced are replaced too.

        Raises:
            UserError, OSError: a new worker cannot start; the old ones stay.
        """
        self.losses_in_a_row = 0
        old = list(self.handles)
        for number in [*old, *[None] * (self.num_workers - len(old))]:
            self._add_new(number)

    def _start(self) -> Handle:
        self._last_number += 1
        seat = Seat(self.build, self.block, SharedBlock(pulse_bytes(2)), self.num_threads)
        return Handle(self._last_number, seat, mp.get_context("spawn"))

    def _add_new(self, instead_of: int | None = None) -> None:
        """Start a worker, shake hands and let it take prompts, in place of `instead_of` or of a lost one."""
        assert self.layout is not None
        handle = self._start()
        try:
            handle.shake_hands(self.layout)
        except BaseException:
            handle.kill()
            raise
        with self.changing:
            if old := self.handles.pop(instead_of, None) if instead_of is not None else None:
                self.leaving[old.number] = old
            is_needed = not self.closed.is_set() and len(self.handles) < self.num_workers
            if is_needed:
                self.handles[handle.number] = handle
        if not is_needed:  # the old worker was lost meanwhile and has been replaced
            handle.kill()
            return
        self._listen(handle)
        if old:
            old.send(Close())

    def _listen(self, handle: Handle) -> None:
        name = f"prefill-{handle.number}"
        threading.Thread(target=self._hear, args=(handle,), name=name, daemon=True).start()

    def _hear(self, handle: Handle) -> None:
        """Carry out a worker's messages until its end."""
        why = "has ended"
        with suppress(EOFError, OSError):
            try:
                while True:
                    self._note(handle, handle.pipe.recv())
            except BrokenProtocol as error:
                why = f"broke the protocol ({error})"
        self._lose(handle, why)

    def _note(self, handle: Handle, message: object) -> None:
        if isinstance(message, Filled):
            self._account.fill(handle.number, message.id, message.num_buffers)
        elif isinstance(message, Ended):
            handle.num_held = message.num_held
            self._account.end(handle.number, message.id, message.error)
            if not message.error:
                self.losses_in_a_row = 0

    def _watch(self) -> None:
        """Send heartbeats, and check those of the workers."""
        while not self.closed.wait(TICK_SECONDS):
            for handle in [*self.handles.values(), *self.leaving.values()]:
                if seconds := handle.seconds_silent():
                    self._lose(handle, f"sent no heartbeat for {seconds:g} s")

    def _lose(self, handle: Handle, why: str) -> None:
        """Kill a worker, end its transfers and replace it, unless it was leaving."""
        with self.changing:
            is_first, handle.is_lost = not handle.is_lost, True
        if not is_first or self.closed.is_set():
            return
        handle.kill()  # before its buffers are lent again, so while `send` still finds it
        with self.changing:
            is_leaving = self.leaving.pop(handle.number, None) is not None
            self.handles.pop(handle.number, None)
        num_missing = self._account.lose(handle.number, f"prefill worker {handle.number} {why}")
        if is_leaving and not num_missing:
            return
        self.num_losses += 1
        self.losses_in_a_row += 1
        here = "1 prompt is" if num_missing == 1 else f"{num_missing} prompts are"
        log.warning("prefill worker %d %s; %s computed here", handle.number, why, here)
        if not is_leaving:
            threading.Thread(target=self._replace_lost, name="prefill-start", daemon=True).start()

    def _replace_lost(self) -> None:
        """Start workers in place of a lost one until one takes prompts."""
        failures = max(0, self.losses_in_a_row - MOST_LOSSES + 1)
        if failures:
            why = f"prefill workers have ended {self.losses_in_a_row} times in a row"
            log.error("%s; the next one starts in %g s", why, pause_after(failures))
        while not self.closed.wait(pause_after(failures)) and self.num_away:
            try:
                self._add_new()
                return
            except Exception as error:
                failures += 1
                log.error("no new prefill worker: %s; the next try is in %g s", error, pause_after(failures))

    @property
    def num_away(self) -> int:
        """The number of workers that are missing: lost and not yet replaced."""
        return self.num_workers - len(self.handles)

    @property
    def _account(self) -> Transfers:
        assert self.transfers is not None  # from `meet` on
        return self.transfers


def pause_after(failures: int) -> float:
    """Return the seconds to wait before the next start after `failures` failed ones in a row."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures - 1, 10)) if failures else 0.0
