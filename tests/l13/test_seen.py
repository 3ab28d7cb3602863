"""Lesson 13. A router's belief about a replica: prefixes only, the oldest forgotten, corrected by reports."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.distributed.routing.seen import SeenBlocks

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
PROMPTS = st.lists(IDS.map(lambda ids: chained(ids)), max_size=12)


def chained(ids):
    """Keys as lesson 12's: each stands for all ids up to its own."""
    return [tuple(ids[: count + 1]) for count in range(len(ids))]


def view_of(*prompts, capacity=10):
    """A view of a replica that was sent these prompts."""
    seen = SeenBlocks(capacity)
    for ids in prompts:
        seen.add(chained(ids))
    return seen


def holding(*prompts):
    """The same view, its state written down by hand: `correct` needs nothing else."""
    seen = SeenBlocks(100)
    for ids in prompts:
        for key in reversed(chained(ids)):
            before = key[:-1] or None
            seen.keys[key] = before
            seen.keys.move_to_end(key)
            seen.behind[before].add(key)
    return seen


def texts(seen):
    """The known blocks, each as the digits of its key."""
    return sorted("".join(map(str, key)) for key in seen.keys)


def following(seen):
    """The known blocks behind each key, without keys that have none."""
    return {before: keys for before, keys in seen.behind.items() if keys}


# ---------------------------------------------------------------- matched


@pytest.mark.task(1)
def test_a_prefix_counts_up_to_its_first_unknown_block():
    seen = view_of([1, 2, 3])
    assert seen.matched(chained([1, 2, 4, 5])) == 2, "blocks 1 and 2 are known, and 4 is not"
    assert seen.matched(chained([2, 3])) == 0, "a block after another prefix is another block"
    assert seen.matched(chained([1, 2, 3])) == 3, "all blocks of the prompt are known"
    assert seen.matched([]) == 0, "an empty prompt has no block"
    assert SeenBlocks(1).matched(chained([1])) == 0, "a replica that was sent nothing has nothing"


@pytest.mark.task(1)
def test_known_blocks_behind_a_gap_do_not_count():
    seen = view_of([1, 2, 3])
    assert seen.matched([(1,), "unknown", (1, 2, 3)]) == 1, "a prefix ends at its first unknown block"


# ---------------------------------------------------------------- add


@pytest.mark.task(1)
def test_a_prompts_end_is_forgotten_before_its_beginning():
    seen = view_of([1, 2, 3], [7, 8], capacity=4)
    assert len(seen) == 4, "it was sent 5 blocks, and its capacity is 4"
    assert seen.matched(chained([7, 8])) == 2, "it forgets what is oldest: the newest prompt is there as a whole"
    assert seen.matched(chained([1, 2, 3])) == 2, "of the older one the end went: without its start nothing is found"


@pytest.mark.task(1)
def test_each_block_is_noted_with_the_one_before_it():
    seen = view_of([1, 2], [1, 3])
    assert dict(seen.keys) == {(1,): None, (1, 2): (1,), (1, 3): (1,)}, (
        "keys: each block's key, with the key of the block before it; None for a prompt's first block"
    )
    assert following(seen) == {None: {(1,)}, (1,): {(1, 2), (1, 3)}}, (
        "behind: for each key, the blocks that directly follow it; when it is lost, `correct` forgets them too"
    )


@pytest.mark.task(1)
def test_a_forgotten_block_is_behind_no_other():
    seen = view_of([1, 2, 3], [7, 8], capacity=4)
    assert following(seen) == {None: {(1,), (7,)}, (1,): {(1, 2)}, (7,): {(7, 8)}}, (
        "the third block was forgotten, so it no longer follows the second one: `_drop` does both"
    )


@pytest.mark.task(1)
def test_a_prompt_that_comes_again_is_young_again():
    seen = view_of([1, 2], [3, 4], [1, 2], [5, 6], capacity=4)
    assert seen.matched(chained([1, 2])) == 2, "it was the second most recent, so it stays"
    assert seen.matched(chained([3, 4])) == 0, "the other one is the oldest now, so it went"


@pytest.mark.task(1)
def test_a_prompt_that_is_too_long_is_known_as_far_as_it_fits():
    seen = view_of([1, 2, 3, 4, 5], capacity=3)
    assert len(seen) == 3, "a prompt of 5 blocks, and a capacity of 3"
    assert seen.matched(chained([1, 2, 3, 4, 5])) == 3, "its beginning stays, not its end"


def test_a_replica_without_blocks_is_refused():
    with pytest.raises(ValueError):
        SeenBlocks(0)


@pytest.mark.task(1)
@given(PROMPTS, st.integers(1, 12))
def test_it_holds_the_latest_keys_and_no_more(prompts, capacity):
    seen, expected = SeenBlocks(capacity), OrderedDict()
    for keys in prompts:
        seen.add(keys)
        for key in reversed(keys):
            expected.pop(key, None)
            expected[key] = None
        expected = OrderedDict(list(expected.items())[-capacity:])
        assert list(seen.keys) == list(expected), "the least recently used first, and a prompt's end before its start"
        assert len(seen) == len(expected), f"at most {capacity} keys"
        assert seen.matched(keys) == len(keys[:capacity]), "a prompt that was just sent is found, as far as it fits"


# ---------------------------------------------------------------- correct


@pytest.mark.task(2)
def test_what_the_replica_did_not_find_is_forgotten():
    seen = holding([1, 2, 3, 4])
    seen.correct(chained([1, 2, 3, 4]), 1)
    assert "1" in texts(seen), "the replica found block 1, so it has it"
    assert "12" not in texts(seen), "it did not find block 12, so it has evicted it"
    assert texts(seen) == ["1"], "the replica has evicted block 12, so it has nothing after it"


@pytest.mark.task(2)
def test_all_that_lies_behind_a_lost_block_is_forgotten_too():
    seen = holding([1, 2, 3, 4], [1, 2, 5], [1, 6])
    seen.correct(chained([1, 2, 7, 8]), 1)
    assert "16" in texts(seen), "block 16 does not follow the lost block 12: other branches stay"
    assert texts(seen) == ["1", "16"], "another prompt's blocks after the lost one are lost; other branches stay"


@pytest.mark.task(2)
def test_a_replica_that_lost_the_first_block_has_lost_all_behind_it():
    seen = holding([0, 1, 2], [0, 3], [9])
    seen.correct(chained([0, 5, 6]), 0)
    assert texts(seen) == ["9"], "it was restarted: all prompts that begin with block 0 are gone"


@pytest.mark.task(2)
def test_a_prompts_last_block_is_computed_even_if_it_is_there():
    seen = holding([1, 2, 3, 4], [1, 2])
    seen.correct(chained([1, 2]), 1)
    assert texts(seen) == ["1", "12", "123", "1234"], "1 of 2 blocks found is all that can be found"
    seen.correct(chained([1]), 0)
    assert len(seen) == 4, "and of 1 block, none"


@pytest.mark.task(2)
def test_a_report_that_finds_more_than_was_believed_forgets_nothing():
    seen = holding([1, 2])
    seen.correct(chained([1, 2, 3, 4, 5]), 4)
    seen.correct(chained([1, 2, 3, 4]), 2)
    seen.correct(chained([7, 8, 9]), 0)
    seen.correct([], 0)
    assert texts(seen) == ["1", "12"], "of what is not known there is nothing to forget"


@pytest.mark.task(2)
@given(PROMPTS, st.lists(st.tuples(IDS, st.integers(0, 6)), max_size=6))
def test_a_report_forgets_the_lost_block_and_what_is_behind_it_and_nothing_else(prompts, reports):
    seen = holding(*(keys[-1] for keys in prompts))
    for ids, num_found in reports:
        before, lost = set(seen.keys), tuple(ids[: num_found + 1])
        seen.correct(chained(ids), num_found)
        expected = {key for key in before if key[: len(lost)] != lost} if num_found < len(ids) - 1 else before
        assert set(seen.keys) == expected, f"a report of {num_found} found blocks of {ids}"


@given(PROMPTS, st.integers(1, 12), st.lists(st.tuples(IDS, st.integers(0, 6)), max_size=12))
def test_a_view_holds_whole_prefixes_only(prompts, capacity, reports):
    seen = SeenBlocks(capacity)
    for keys, (ids, num_found) in zip(prompts, reports, strict=False):
        seen.add(keys)
        seen.correct(chained(ids), num_found)
        assert all(len(key) == 1 or key[:-1] in seen.keys for key in seen.keys), "a block without the one before it"
        assert set(seen.behind) <= {None, *seen.keys}, "a block that was forgotten is still noted in `behind`"
        seen.add(keys)
        assert seen.matched(keys) == len(keys[:capacity])
