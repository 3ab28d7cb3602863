"""Lesson 15. The walk over the blocks with a window: each query sees the last W keys, and no block behind is read."""

from dataclasses import replace

import pytest
import torch

from mini_engine.attention import blockwise
from mini_engine.attention.contract import EVERY_KEY
from mini_engine.windows.attention import attend_blocks, paged_attention
from tests.kernels.cases import make_case

pytestmark = pytest.mark.task(2)
MIXED = [(1, 9), (4, 4), (3, 8), (1, 1), (0, 5), (5, 14)]  # (q_len, kv_len)
SCALE = 32**-0.5  # of the cases' heads
NAN = "NaN. Was a block behind the window read, has a query seen no key, or is -inf minus -inf computed?"


def without_holes(lengths, window):
    """Return a case whose tables and blocks are whole, as if the window were no news yet."""
    return replace(make_case(lengths), window=window)


def check(case, teach):
    out = paged_attention(*case.inputs, case.window)
    assert not out.isnan().any(), f"{teach}: {NAN}"
    error = case.error_of(out)
    assert error < 1e-5, f"{teach}: relative error {error:.2g} against a dense mask in float64"


def test_the_window_begins_after_the_key_at_position_minus_window():
    before = attend(make_case([(1, 9)]), 9, window=3)  # position 8 sees the keys 6, 7 and 8
    assert not before.isnan().any(), f"a decode of 9 tokens with a window of 3 and blocks of 4: {NAN}"
    for key, seen in ((5, False), (6, True)):
        changed = make_case([(1, 9)])
        block, offset = int(changed.batch.block_table[0, key // 4]), key % 4
        changed.caches[1][block, offset] += 1
        differs = not torch.equal(attend(changed, 9, window=3), before)
        assert differs == seen, f"position 8 with a window of 3 {'sees' if seen else 'does not see'} key {key}"


def attend(case, kv_len, window):
    blocks = case.batch.block_table[0].tolist()
    return attend_blocks(case.q[case.rows[0]], *case.caches, blocks, kv_len, SCALE, window)


@pytest.mark.parametrize("window", [3, 2, 4, 5, 64, 1])
def test_a_query_sees_the_last_keys_of_its_own_position(window):
    check(without_holes([(1, 9)], window), f"a decode of 9 tokens with a window of {window} and blocks of 4")


@pytest.mark.parametrize("window", [2, 3, 4, 5])
def test_each_query_of_a_chunk_has_a_window_of_its_own(window):
    check(without_holes([(6, 11)], window), f"6 queries after 5 tokens, with a window of {window} and blocks of 4")


def test_a_late_query_that_sees_nothing_of_the_first_blocks_is_no_nan():
    check(without_holes([(12, 12)], 2), "12 queries over blocks of 4, with a window of 2")


@pytest.mark.parametrize("window", [2, 4, 7])
def test_blocks_are_read_from_the_first_visible_one_on(window):
    case, seen = make_case([(3, 21)]), []
    blocks = case.batch.block_table[0].tolist()
    attend_blocks(case.q[:3], *case.caches, blocks, 21, SCALE, window, lambda scores, *_: seen.append(scores))
    first = (21 - 3 - window + 1) // 4
    assert len(seen) == 6 - first, f"position 18 sees {window} keys, so block {first} is the first of 6 that are read"


@pytest.mark.parametrize("entry", [0, -1, 10**6])
def test_an_entry_behind_the_window_is_never_followed(entry):
    for window in (2, 3, 4, 5):
        check(make_case(MIXED, window=window, entry=entry), f"table entries behind a window of {window} are {entry}")


def test_a_mixed_batch_gives_what_a_dense_mask_gives():
    for window in (2, 3, 4, 5, 64):
        check(without_holes(MIXED, window), f"a mixed batch with a window of {window}")


@pytest.mark.reference  # a right walk may add in another order
def test_a_window_longer_than_the_text_changes_no_bit():
    case = make_case(MIXED)
    plain = blockwise.paged_attention(*case.inputs)
    for window in (14, EVERY_KEY):
        assert torch.equal(paged_attention(*case.inputs, window=window), plain), "every key is visible, as in lesson 3"


def test_a_visible_block_that_is_not_in_the_cache_is_refused():
    case = make_case([(1, 9)])
    case.batch.block_table[0, 1] = -1  # holds keys 4 … 7, of which 6 and 7 are visible
    try:
        attend(case, 9, window=3)
    except IndexError:
        return
    raise AssertionError(
        "keys 6 and 7 are visible, and their block is -1: raise IndexError; torch takes the last block"
    )
