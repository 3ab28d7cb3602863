"""Lesson 15. What a request is promised: all that it will hold, and no more than a window and a step can touch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.windows.memory import WindowMemory
from tests.shared.window_ledger import Windows, compute


def memory(window=6, size=4, max_step=8, num_groups=1):
    return WindowMemory(RefCountedAllocator(8, size), window, num_groups, max_step)


def touched(first, stop, size):
    """Return how many blocks hold tokens first … stop - 1."""
    return (stop - 1) // size - first // size + 1


@pytest.mark.task(5)
@given(st.integers(2, 40), st.integers(1, 20), st.integers(1, 40))
def test_the_most_is_what_a_window_and_a_step_can_touch(window, size, max_step):
    """Behind any token it keeps the window of the last whole block's end, and a step adds max_step tokens."""
    ends = [(start // size * size, start + max_step) for start in range(window + size, window + 2 * size)]
    most = max(touched(end - window + 1, stop, size) for end, stop in ends)
    got = memory(window, size, max_step).most_held
    assert got == most, (
        f"W = {window}, blocks of {size}, steps of {max_step}: the worst alignment touches {most} blocks"
    )


@pytest.mark.parametrize(
    ("chunk", "budget", "speculate", "most"),
    [(8, 64, None, 8), (1, 64, None, 1), (1, 64, 4, 1 + 4 * 2), (1, 5, 4, 5), (8, 64, 4, 1 + 4 * 2), (32, 64, 4, 32)],
)
def test_drafts_count_as_tokens_of_a_step(chunk, budget, speculate, most):
    """Two requests may run. One of them may get all the drafts of a step: `max_drafts`."""
    config = EngineConfig(speculate=speculate, scheduler_config=SchedulerConfig(2, budget, chunk))
    assert config.most_in_step == most


@pytest.mark.task(5)
@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "num_held", "expected"),
    [
        (8, 0, 0, 2),  # one step: all its blocks
        (9, 0, 0, 3),  # two steps, and the table is shorter than the most
        (100, 0, 0, 5),  # many steps: two blocks of a window, and three that a step of 8 can touch
        (14, 13, 3, 0),  # a decode whose block has room; another may begin behind 12, and see 8 … 12 there
        (17, 16, 2, 1),  # a decode that begins a block
        (24, 16, 2, 2),  # the last step of a prompt
        (40, 16, 2, 3),  # several steps left
    ],
)
def test_the_need_of_a_request(num_tokens, num_computed, num_held, expected):
    got = memory().num_needed(num_tokens, num_computed, num_held)
    assert got == expected, (
        f"W = 6, blocks of 4, steps of up to 8: {num_computed} tokens computed with {num_held} blocks held, so up to "
        f"{num_tokens} tokens need {expected} more"
    )


@pytest.mark.task(5)
def test_each_group_needs_as_many():
    got = [memory(num_groups=3).num_needed(num_tokens, 0, 0) for num_tokens in (100, 8)]
    assert got == [15, 6], "three groups, each of which needs what one alone would"


@pytest.mark.task(5)
@pytest.mark.parametrize("num_computed", [8, 13, 30])
def test_a_need_is_never_negative(num_computed):
    """A table may be longer than what is needed: a step ended in the middle of a block, or guesses were truncated."""
    for num_tokens in (num_computed, num_computed + 1, num_computed + 20):
        got = memory().num_needed(num_tokens, num_computed, 7)
        assert got >= 0, (
            f"7 blocks are more than {num_tokens} tokens need, and what is held is not given back: 0, not {got}"
        )


@pytest.mark.task(5)
def test_a_long_prompt_needs_no_more_than_a_middling_one():
    one = memory()
    assert one.num_needed(10_000, 0, 0) == one.num_needed(40, 0, 0), "a request frees blocks as it goes"
    assert one.num_needed(10_000, 9_000, 2) == one.num_needed(40, 16, 2), (
        "where it stands does not matter, if it has more than a step to go"
    )


def test_the_cost_of_an_admission_counts_every_group_and_what_is_found():
    kv, tokens = Windows(num_groups=2, num_blocks=90), list(range(40))
    assert kv.cost(tokens, 40).num_blocks == 10 + 2 * 5, "ten blocks of group 0; a window group takes no more than five"
    kv.allocate("a", tokens)
    compute(kv, "a", tokens)
    found = kv.coordinator.prefixes.peek([*tokens[:36], 99, 98], None, {}).num_tokens
    assert found == 36
    cost = kv.cost([*tokens[:36], 99, 98], 38).num_blocks
    adopted = kv.kept.evictable_in(kv.tables["a"].blocks[7:9])
    assert adopted == 2, "the first request has passed block 7, so only the tree holds it; block 8 is in its window"
    assert cost == 3 + adopted, (
        "a block for the new tokens in each group; found blocks that count as free do so no more"
    )
