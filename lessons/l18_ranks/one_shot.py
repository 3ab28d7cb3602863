"""Lesson 18. A one-shot all-reduce in shared memory, in Python: the algorithm of `meeting.cpp`, step by step.

    flags    one for each rank: the number of the latest meeting that it has joined
    parts    two halves, which meetings use in turn; in each, a place for every rank

A rank copies its part into its own place, raises its flag, waits for the flags of all others and adds up all parts. No
two ranks write to the same place, so no lock is needed.

`add_up` is a generator: it yields before every access to the board, where any other rank may run, like processes that
interleave. So a test can try every order, and the player on lesson 18's page can show one.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


class Board:
    """The memory that all ranks share: their flags, 0 at first, and two places for each.

    Args:
        count: numbers in a part.
    """

    def __init__(self, num_ranks: int, count: int, dtype: torch.dtype = torch.float32) -> None:
        self.num_ranks = num_ranks
        self.flags = [0] * num_ranks
        self.parts = torch.zeros(2, num_ranks, count, dtype=dtype)

    def put(self, half: int, rank: int, x: Tensor) -> None:
        """Copy x `[count]` into a rank's place."""
        self.parts[half, rank] = x

    def get(self, half: int, rank: int) -> Tensor:
        """Return a copy of a rank's place, `[count]`."""
        return self.parts[half, rank].clone()

    def flag(self, rank: int) -> int:
        """Return the number of the latest meeting that a rank has joined."""
        return self.flags[rank]

    def raise_flag(self, rank: int, meeting: int) -> None:
        """Announce that a rank's part of this meeting is in its place."""
        self.flags[rank] = meeting


def add_up(x: Tensor, board: Board, rank: int, meeting: int) -> Iterator[None]:
    """Add x `[count]` over all ranks, in place, while the other ranks run.

    Parts are added in the order of the ranks, in float32, and the sum is rounded once: all ranks have the same bits.

    Args:
        board: shared by all ranks; its flags and places are accessed only through its methods.
        meeting: its number, counted from 1 and the same in all ranks. Even meetings use half 0, odd ones half 1.

    Yields:
        before each call of a method of `board`, so at least once for each read of a flag: another rank may run there.
    """
    half = meeting % 2
    yield
    board.put(half, rank, x)
    yield
    board.raise_flag(rank, meeting)
    for other in range(board.num_ranks):
        yield
        while board.flag(other) < meeting:
            yield
    total = torch.zeros_like(x, dtype=torch.float32)
    for other in range(board.num_ranks):
        yield
        total += board.get(half, other)
    x.copy_(total)
