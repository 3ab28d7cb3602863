"""Lesson 18. A sum in shared memory: every rank has it, in whatever order the ranks run.

No processes and no threads: each rank is a generator, and the tests choose which of them takes the next step. So every
order can be tried, and one that fails fails again.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lessons.l18_ranks.one_shot import Board, add_up

COUNT = 3
MOST_STEPS = 4_000  # a rank that still waits after so many will wait forever


class Watched(Board):
    """A board that allows one access a step, notes it, and lets a rank write its own place and flag only."""

    def __init__(self, num_ranks, dtype=torch.float32):
        super().__init__(num_ranks, COUNT, dtype)
        self.running, self.accesses = 0, list[tuple[str, int]]()
        self.done = list[tuple[int, str, int]]()  # rank, what, whose

    def access(self, what, rank):
        self.accesses.append((what, rank))
        self.done.append((self.running, what, rank))
        told = " and ".join(f"{name}({of})" for name, of in self.accesses)
        assert len(self.accesses) == 1, f"{told} without a yield between them: another rank may run there"
        if what in ("put", "raise_flag"):
            assert rank == self.running, (
                f"rank {self.running} writes rank {rank}'s: each writes its own, or they collide"
            )

    def put(self, half, rank, x):
        self.access("put", rank)
        super().put(half, rank, x)

    def get(self, half, rank):
        self.access("get", rank)
        return super().get(half, rank)

    def flag(self, rank):
        self.access("flag", rank)
        return super().flag(rank)

    def raise_flag(self, rank, meeting):
        self.access("raise_flag", rank)
        super().raise_flag(rank, meeting)


def part_of(rank, meeting, dtype=torch.float32):
    """What a rank brings to a meeting: powers of two, so that every sum says which parts are in it."""
    return torch.tensor([2.0 ** (3 * rank), 10.0 * meeting, float(rank)]).to(dtype)


def total_of(num_ranks, meeting):
    return [sum(2.0 ** (3 * rank) for rank in range(num_ranks)), 10.0 * meeting * num_ranks, sum(range(num_ranks))]


class Ranks:
    """Ranks that come to several meetings, one after another; `found[rank]` are the sums that each has had."""

    def __init__(self, num_ranks, num_meetings, dtype=torch.float32, part=part_of):
        self.board = Watched(num_ranks, dtype)
        self.found = [list[torch.Tensor]() for _ in range(num_ranks)]
        self.alive = {rank: self.meetings(rank, num_meetings, dtype, part) for rank in range(num_ranks)}

    def meetings(self, rank, num_meetings, dtype, part):
        for meeting in range(1, num_meetings + 1):
            x = part(rank, meeting, dtype)
            yield from add_up(x, self.board, rank, meeting)
            self.found[rank].append(x)

    def step(self, rank):
        """Let a rank run until its next yield."""
        self.board.running, self.board.accesses = rank, []
        if rank in self.alive and next(self.alive[rank], self) is self:
            del self.alive[rank]

    def finish(self):
        """Let all ranks run in turn until they are done."""
        for _ in range(MOST_STEPS):
            for rank in list(self.alive):
                self.step(rank)
        assert not self.alive, f"ranks {sorted(self.alive)} wait for a flag that no rank will raise"
        return [[x.tolist() for x in sums] for sums in self.found]


@pytest.mark.task(5)
def test_a_rank_that_is_alone_has_its_own_part():
    assert Ranks(1, 1).finish() == [[part_of(0, 1).tolist()]], "the sum over one rank is what it brought"


@pytest.mark.task(5)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_has_the_sum_of_all_parts(num_ranks):
    for rank, sums in enumerate(Ranks(num_ranks, 1).finish()):
        assert sums == [total_of(num_ranks, 1)], f"rank {rank} needs the parts of all {num_ranks} ranks, its own once"


@pytest.mark.task(5)
def test_a_part_is_in_its_place_before_its_flag_is_raised():
    ranks = Ranks(2, 1)
    while ranks.board.flags == [0, 0]:
        ranks.step(0)
    assert ranks.board.parts[1, 0].tolist() == part_of(0, 1).tolist(), (
        "a rank that sees the flag reads the part: put it first, in half 1 for meeting 1"
    )


@pytest.mark.task(5)
def test_a_rank_waits_for_the_others():
    ranks = Ranks(2, 1)
    for _ in range(100):
        ranks.step(0)
    assert not ranks.found[0], "rank 1 has not come yet: its flag is 0"
    assert ("get", 1) not in [(what, rank) for _, what, rank in ranks.board.done], "there is nothing to read yet"
    assert ranks.finish() == [[total_of(2, 1)]] * 2


@pytest.mark.task(5)
def test_a_rank_that_runs_ahead_leaves_a_slow_one_its_parts():
    """Rank 1 leaves the first meeting and comes to the second before rank 0 has read anything."""
    ranks = Ranks(2, 2)
    while ranks.board.flags[0] < 1:
        ranks.step(0)
    for _ in range(50):
        ranks.step(1)
    assert ranks.found[1] and ranks.board.flags[1] == 2, "rank 1 is free to go on: rank 0's part is there"
    found = ranks.finish()
    assert found[0] == [total_of(2, 1), total_of(2, 2)], (
        "rank 0 still reads the parts of meeting 1 while rank 1 writes that of meeting 2: they need two halves"
    )
    assert found[1] == found[0]


@pytest.mark.task(5)
def test_a_rank_that_is_ahead_counts_as_there():
    """Rank 1's flag says 2 before rank 0 has looked at it for meeting 1."""
    ranks = Ranks(2, 2)
    while ranks.board.flags[0] < 1:
        ranks.step(0)
    while ranks.board.flags[1] < 2:
        ranks.step(1)
    assert ranks.finish() == [[total_of(2, 1), total_of(2, 2)]] * 2, "a flag of 2 also says that meeting 1 was met"


@pytest.mark.task(5)
def test_one_meeting_is_enough_for_a_sum():
    ranks = Ranks(3, 4)
    ranks.finish()
    raised = [rank for rank, what, _ in ranks.board.done if what == "raise_flag"]
    assert len(raised) == 3 * 4, "each rank raises its flag once a sum; a second round would cost as much as the first"
    read = [rank for rank, what, _ in ranks.board.done if what == "get"]
    assert len(read) <= 3 * 3 * 4, "each rank reads every part once"


@pytest.mark.task(5)
def test_all_ranks_have_the_same_bits():
    """2**-24 + 2**-24 + 1 depends on which two are added first."""

    def part(rank, meeting, dtype):
        return torch.full((COUNT,), [2.0**-24, 2.0**-24, 1.0][rank], dtype=dtype)

    found = Ranks(3, 1, part=part).finish()
    assert found[1] == found[0] and found[2] == found[0], "add in the order of the ranks, not one's own part first"


@pytest.mark.task(5)
def test_bfloat16_is_rounded_once():
    check_is_rounded_once(torch.bfloat16, 256.0)


@pytest.mark.task(5)
def test_float16_is_rounded_once():
    check_is_rounded_once(torch.float16, 2048.0)


def check_is_rounded_once(dtype, large):
    def part(rank, meeting, dtype):
        return torch.full((COUNT,), [large, 1.0, 1.0][rank], dtype=dtype)

    for rank, sums in enumerate(Ranks(3, 1, dtype, part).finish()):
        assert sums == [[large + 2] * COUNT], (
            f"rank {rank}: {large:g} + 1 is {large:g} in {dtype}, so add in float32 and round the sum"
        )


@pytest.mark.task(5)
@given(data=st.data())
def test_every_order_of_steps_gives_every_rank_every_sum(data):
    num_ranks = data.draw(st.integers(2, 3), "ranks")
    order = data.draw(st.lists(st.integers(0, num_ranks - 1), max_size=120), "order")
    ranks = Ranks(num_ranks, 4)
    for rank in order:
        ranks.step(rank)
    expected = [total_of(num_ranks, meeting) for meeting in range(1, 5)]
    for rank, sums in enumerate(ranks.finish()):
        assert sums == expected, f"rank {rank} of {num_ranks} added a part of another meeting, in the order {order}"


@pytest.mark.reference
@pytest.mark.parametrize("steps", [9, pytest.param(12, marks=pytest.mark.nightly)])
def test_every_order_of_the_first_steps_gives_every_rank_every_sum(steps):
    """Two ranks; the steps behind these come in turn."""
    for order in itertools.product((0, 1), repeat=steps):
        ranks = Ranks(2, 2)
        for rank in order:
            ranks.step(rank)
        assert ranks.finish() == [[total_of(2, 1), total_of(2, 2)]] * 2, order
