"""Lesson 3. How the Triton kernel's work is cut into programs: enough tiles for any batch, splits only for decode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.attention.triton_launch import MAX_SPLITS, MIN_SPLIT, LaunchConfig, launch_config

QWEN = dict(group=2, dim=128, element_bytes=2)  # Qwen3-0.6B in bfloat16


def config(num_rows: int, num_seqs: int, reach: int = 4096, **changes) -> LaunchConfig:
    return launch_config(num_rows=num_rows, num_seqs=num_seqs, reach=reach, **(QWEN | changes))


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def test_a_batch_of_decodes_has_small_tiles_and_splits_the_history(num_seqs):
    got = config(num_seqs, num_seqs)
    assert got.rows == 16, "a decode has few rows; a larger tile computes with padding"
    assert (got.split, got.splits, got.needs_merge) == (512, 8, True), (
        "4096 keys are 8 splits of 512: with one program a tile, a batch of decodes leaves most of a GPU idle"
    )


def test_prompts_have_large_tiles_and_one_split():
    got = config(num_rows=300, num_seqs=2)
    assert (got.rows, got.splits, got.needs_merge) == (64, 1, False), "a prompt has tiles enough without splits"
    assert got.split == 4096, "the one split is the whole reach of the block table"


def test_one_row_more_than_sequences_is_no_batch_of_decodes():
    assert config(8, 8).needs_merge and not config(9, 8).needs_merge


@pytest.mark.parametrize("reach, split, splits", [(512, 512, 1), (513, 512, 2), (16384, 512, 32), (16385, 1024, 17)])
def test_splits_are_long_enough_to_be_worth_it_and_never_too_many(reach, split, splits):
    got = config(1, 1, reach)
    assert (got.split, got.splits) == (split, splits), f"{reach} keys"


def test_wide_heads_get_fewer_rows_and_keys():
    narrow, wide = config(300, 1, dim=128, element_bytes=4), config(300, 1, dim=256, element_bytes=4)
    assert (narrow.rows, narrow.keys) == (64, 32)
    assert (wide.rows, wide.keys) == (32, 16), "64 rows of 1024 bytes do not fit into shared memory beside K and V"


def test_a_tile_holds_a_whole_group_of_heads():
    assert config(8, 8, group=40).rows == 64, "one query's group may need more rows than the smallest tile has"
    assert config(8, 8, dim=80).width == 128, "Triton's vectors are powers of two"


@given(
    q_lens=st.lists(st.integers(0, 70), min_size=1, max_size=12).filter(any),
    padding=st.integers(0, 20),
    group=st.integers(1, 40),
    dim=st.sampled_from([8, 48, 128, 256]),
    element_bytes=st.sampled_from([2, 4]),
    reach=st.integers(0, 70_000),
)
def test_every_query_has_a_tile_and_every_key_a_split(q_lens, padding, group, dim, element_bytes, reach):
    """Sequence s begins at tile starts[s] // queries + s, as `_find_sequence` has it."""
    got = config(sum(q_lens) + padding, len(q_lens), reach, group=group, dim=dim, element_bytes=element_bytes)
    queries, start = got.rows // group, 0
    assert queries >= 1, "a tile has no room for one query's group of heads"
    for s, q_len in enumerate(q_lens):
        last = start // queries + s + max(0, q_len - 1) // queries
        start += q_len
        assert last < got.tiles, f"sequence {s} of {q_lens} needs tile {last} of {got.tiles}"
        assert last < start // queries + s + 1, f"sequence {s} of {q_lens} runs into the next one's tiles"
    assert 1 <= got.splits <= MAX_SPLITS and got.splits * got.split >= reach
    assert not got.needs_merge or got.split >= MIN_SPLIT
    assert got.padded_splits >= got.splits
