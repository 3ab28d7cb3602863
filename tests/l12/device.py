"""Lesson 12. Shared by the tests: a device whose streams run when a test says so, and a pool of numbers on it."""

from collections import deque
from functools import partial

import torch

from mini_engine.tiers.blocks import BlockBytes
from tests.shared.tier_cells import BLOCKS, SIZE


class Mark:
    """A place in a stream, as an event of CUDA is."""

    def __init__(self, stream, place):
        self.stream, self.place = stream, place

    @property
    def is_reached(self):
        return self.stream.num_done >= self.place

    def synchronize(self):
        while not self.is_reached:
            self.stream.run_one()


class SlowStream:
    """Work in order, done when a test says so or when it is waited for; if `eager`, as soon as it can be."""

    def __init__(self, eager=False):
        self.work, self.eager = deque(), eager
        self.num_submitted = self.num_done = 0

    def submit(self, work):
        self.work.append(work)
        self.num_submitted += 1
        while self.eager and self.can_run:
            self.run_one()

    def record(self):
        return Mark(self, self.num_submitted)

    def wait(self, mark):
        self.submit(mark)

    @property
    def can_run(self):
        return bool(self.work) and (not isinstance(self.work[0], Mark) or self.work[0].is_reached)

    def run_one(self):
        """Do what comes next, after what it waits for in the other stream."""
        work = self.work.popleft()
        self.num_done += 1
        work.synchronize() if isinstance(work, Mark) else work()

    def drain(self):
        while self.work:
            self.run_one()


class DeviceCells(BlockBytes):
    """A pool of one number per slot, as `Cells`, on a device: all that is done to it is done in its compute stream."""

    def __init__(self, compute):
        self.compute, self.numbers = compute, torch.zeros(BLOCKS, SIZE, dtype=torch.int64)
        super().__init__([self.numbers])
        self.slots = self

    def __getitem__(self, slot):
        self.compute.drain()  # as a caller that needs a number waits for it
        return int(self.numbers.view(-1)[slot])

    def __setitem__(self, slot, number):
        self.compute.submit(partial(self.numbers.view(-1).__setitem__, slot, number))

    def read(self, blocks):
        self.compute.drain()
        return super().read(blocks)

    def write(self, blocks, payloads):
        self.compute.submit(partial(super().write, list(blocks), list(payloads)))

    def copy(self, sources, targets):
        def copy():
            self.numbers[list(targets)] = self.numbers[list(sources)]

        self.compute.submit(copy)


class HeldCopier:
    """Finishes copies when a test says so, or when it is closed."""

    def __init__(self, num_room=10**6):
        self.copies, self.num_room = deque(), num_room

    @property
    def has_room(self):
        return len(self.copies) < self.num_room

    def offer(self, copy):
        self.copies.append(copy)

    def finish_one(self):
        self.copies.popleft().finish()

    def flush(self, seconds):
        """Finish nothing: a step does not wait for copies."""
        return True

    def close(self, seconds):
        while self.copies:
            self.finish_one()
