"""Lesson 19. The receiver's view of prefill workers: starts them, hears them, notices their end, and replaces them.

A worker that has died, or was stopped and gave no sign of life, is killed before its buffers are used again: one that
woke up later would write into them. Then its transfers end, and another worker takes its place. If that one cannot
start, or ends soon, too, there are further tries, after pauses that grow.
"""

import hashlib
import logging
import threading
from array import array
from collections.abc import Callable, Hashable
from contextlib import suppress

import torch
import torch.multiprocessing as mp

from mini_engine.distributed.routing.policy import Policy
from mini_engine.handover.handle import Handle
from mini_engine.handover.prefill import Seat
from mini_engine.handover.protocol import Ask, Cancel, Close, Ended, Filled, Layout
from mini_engine.handover.stage import BrokenProtocol
from mini_engine.handover.transfers import Transfers
from mini_engine.kv.radix_node import TOKEN_BYTES
from mini_engine.ranks.pulse import TICK_SECONDS
from mini_engine.ranks.shared_block import SharedBlock
from mini_engine.tiers.keys import chain

MOST_LOSSES = 3  # in a row, without a transfer that was whole: from then on there is a pause before the next start
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds; each pause is twice the one before

log = logging.getLogger(__name__)


class PrefillWorkers:
    """Processes that compute prompts, all over one block of shared memory.

    torch's threads are divided among this process and the workers as long as they run.

    Args:
        build: makes a worker's engine, in its process: `Seat.build`.
        block: the memory of the buffers.
        policy: chooses the worker of a prompt, by its blocks: lesson 13's.

    Attributes:
        handles: the workers that take prompts, by number. A number is never used twice.
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
        """Shake hands with all workers: wait until they are ready, and compare what they say with this layout.

        Raises:
            UserError: one cannot start, or its buffers would have other contents; all have been ended.
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

    # ---------------------------------------------------------------- what the connector asks for

    def choose(self, tokens: array, namespace: Hashable) -> int | None:
        """Return the number of the worker that a prompt should go to; None if there is none."""
        loads = {number: float(self._account.num_open(number)) for number in list(self.handles)}
        if not loads:
            return None
        root = hashlib.sha256(repr(namespace).encode()).digest()
        keys = list(chain(root, tokens.tobytes(), self.block_size * TOKEN_BYTES))
        number = self.policy.choose(keys, loads)
        self.policy.sent(number, keys)
        return number

    def send(self, sender: int, message: Ask | Cancel) -> None:
        """Send a worker a message. If it is lost, its transfers are ended instead."""
        handle = self.handles.get(sender) or self.leaving.get(sender)
        if handle is None:
            self._account.lose(sender, "the worker is gone")
        else:
            handle.send(message)

    def close(self) -> None:
        """End all workers, whatever they do. Idempotent."""
        self.closed.set()
        with self.changing:
            handles = [*self.handles.values(), *self.leaving.values()]
            self.handles, self.leaving = {}, {}
        for handle in handles:
            handle.kill()
        torch.set_num_threads(self.threads)

    # ---------------------------------------------------------------- a worker's life

    def replace_all(self) -> None:
        """Replace the workers one by one. Each new one is ready before an old one leaves, which ends what it has begun.

        If some were lost and not replaced, new ones take their places, too.

        Raises:
            UserError, OSError: a new one cannot start; the old ones stay.
        """
        self.losses_in_a_row = 0
        old = list(self.handles)
        for number in [*old, *[None] * (self.num_workers - len(old))]:
            self._add_new(number)

    def _start(self) -> Handle:
        self._last_number += 1
        seat = Seat(self.build, self.block, SharedBlock(Handle.PULSE_BYTES), self.num_threads)
        return Handle(self._last_number, seat, mp.get_context("spawn"))

    def _add_new(self, instead_of: int | None = None) -> None:
        """Start a worker, shake hands and let it take prompts, in the place of another one or of one that was lost."""
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
        if not is_needed:  # the one that it was to replace was lost meanwhile, and has been replaced
            handle.kill()
            return
        self._listen(handle)
        if old:
            old.send(Close())

    def _listen(self, handle: Handle) -> None:
        name = f"prefill-{handle.number}"
        threading.Thread(target=self._hear, args=(handle,), name=name, daemon=True).start()

    def _hear(self, handle: Handle) -> None:
        """Carry out what a worker says, until its end."""
        why = "has ended"
        with suppress(EOFError, OSError):
            try:
                while True:
                    self._note(handle, handle.receive())
            except BrokenProtocol as error:
                why = f"has broken the protocol ({error})"
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
        """Give signs of life, and look for those of the workers."""
        while not self.closed.wait(TICK_SECONDS):
            for handle in [*self.handles.values(), *self.leaving.values()]:
                if seconds := handle.seconds_silent():
                    self._lose(handle, f"gave no sign of life for {seconds:g} s")

    def _lose(self, handle: Handle, why: str) -> None:
        """Kill a worker, end its transfers and have another one take its place, unless it was leaving."""
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
        """Start a worker in the place of one that was lost, until one takes prompts."""
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
        """How many workers are missing: lost, and not replaced so far."""
        return self.num_workers - len(self.handles)

    @property
    def _account(self) -> Transfers:
        assert self.transfers is not None  # from `meet` on
        return self.transfers


def pause_after(failures: int) -> float:
    """Return the seconds to wait before the next start, after so many that failed in a row."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures - 1, 10)) if failures else 0.0
