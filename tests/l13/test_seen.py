"""Lesson 13. What a router believes of a replica: prefixes only, the oldest forgotten, corrected by reports."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.routing.seen import SeenBlocks

PROMPTS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6).map(lambda ids: chained(ids)), max_size=12)


def chained(ids):
    """Keys as lesson 12's: each stands for all ids up to its own."""
    return [tuple(ids[: count + 1]) for count in range(len(ids))]


def test_a_prefix_counts_up_to_its_first_unknown_block():
    seen = SeenBlocks(10)
    seen.add(chained([1, 2, 3]))
    assert seen.matched(chained([1, 2, 4, 5])) == 2
    assert seen.matched(chained([2, 3])) == 0, "a block behind another prefix is another block"
    assert seen.matched([]) == 0


def test_a_prompts_end_is_forgotten_before_its_beginning():
    seen = SeenBlocks(4)
    seen.add(chained([1, 2, 3]))
    seen.add(chained([7, 8]))
    assert seen.matched(chained([7, 8])) == 2, "the newest prompt is there as a whole"
    assert seen.matched(chained([1, 2, 3])) == 2, "of the older one the end went: without its start nothing is found"


def test_a_prompt_that_comes_again_is_young_again():
    seen = SeenBlocks(4)
    for ids in ([1, 2], [3, 4], [1, 2], [5, 6]):
        seen.add(chained(ids))
    assert seen.matched(chained([1, 2])) == 2 and seen.matched(chained([3, 4])) == 0


def test_what_the_replica_did_not_find_is_forgotten():
    seen = SeenBlocks(10)
    seen.add(chained([1, 2, 3]))
    seen.correct(chained([1, 2, 3]), 1)
    assert seen.matched(chained([1, 2, 3])) == 1, "the replica evicted two blocks, and said so"


def test_a_replica_without_blocks_is_refused():
    with pytest.raises(ValueError):
        SeenBlocks(0)


@given(PROMPTS, st.integers(1, 12))
def test_it_holds_the_latest_keys_and_no_more(prompts, capacity):
    seen, expected = SeenBlocks(capacity), OrderedDict()
    for keys in prompts:
        seen.add(keys)
        for key in reversed(keys):
            expected.pop(key, None)
            expected[key] = None
        expected = OrderedDict(list(expected.items())[-capacity:])
        assert list(seen.keys) == list(expected)
        held = len(keys[:capacity])
        assert seen.matched(keys) == held, "a prompt that was just sent is found, as far as it fits"
