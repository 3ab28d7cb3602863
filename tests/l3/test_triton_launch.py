"""Lesson 3. The Triton kernel's work, cut into programs: tiles for any batch, splits for any length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.attention.triton_launch import MAX_SPLITS, MIN_SPLIT, LaunchConfig, launch_config

QWEN = dict(group=2, dim=128, tensor_cores=True)  # Qwen3-0.6B in bfloat16


def config(num_rows: int, num_seqs: int, reach: int = 4096, **changes) -> LaunchConfig:
    return launch_config(num_rows=num_rows, num_seqs=num_seqs, reach=reach, **(QWEN | changes))


@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def test_a_batch_of_decodes_has_small_tiles(num_seqs):
    got = config(num_seqs, num_seqs)
    assert got.rows == 16, "a decode has few rows; a larger tile computes with padding"


@pytest.mark.parametrize("num_rows", [8, 9, 300])
def test_histories_are_split_whatever_else_is_in_the_step(num_rows):
    assert config(num_rows, 8).splits == 16, "a decode beside a prompt's chunk waits for a program that walks all keys"
    assert config(num_rows, 8).needs_merge


def test_prompts_have_large_tiles():
    assert config(num_rows=300, num_seqs=2).rows == 64


@pytest.mark.parametrize("reach, splits", [(0, 1), (256, 1), (257, 2), (8192, 32), (8193, 32), (10**6, 32)])
def test_splits_are_long_enough_to_be_worth_it_and_never_too_many(reach, splits):
    assert config(1, 1, reach).splits == splits, f"{reach} keys"


def test_tiles_are_smaller_for_wide_heads_and_without_tensor_cores():
    assert [config(300, 1, dim=dim).rows for dim in (64, 128, 256)] == [64, 64, 32]
    assert [config(300, 1, dim=dim, tensor_cores=False).rows for dim in (64, 128, 256)] == [32, 32, 16]
    assert [config(300, 1, dim=dim).keys for dim in (64, 128, 256)] == [64, 64, 32]


def test_a_tile_holds_a_whole_group_of_heads():
    assert config(8, 8, group=40).rows == 64, "one query's group may need more rows than the smallest tile has"
    assert config(8, 8, dim=80).width == 128, "Triton's vectors are powers of two"
    assert config(8, 8, dim=8).width == 16, "a tile of tl.dot has at least 16 columns"


@given(
    q_lens=st.lists(st.integers(0, 70), min_size=1, max_size=12).filter(any),
    padding=st.integers(0, 20),
    group=st.integers(1, 40),
    dim=st.sampled_from([8, 48, 128, 256]),
    tensor_cores=st.booleans(),
    reach=st.integers(0, 70_000),
    share=st.floats(0, 1),
)
def test_every_query_has_a_tile_and_every_key_a_split(q_lens, padding, group, dim, tensor_cores, reach, share):
    """Sequence s begins at tile starts[s] // queries + s, as `_find_sequence` has it."""
    got = config(sum(q_lens) + padding, len(q_lens), reach, group=group, dim=dim, tensor_cores=tensor_cores)
    queries, start = got.rows // group, 0
    assert queries >= 1, "a tile has no room for one query's group of heads"
    for s, q_len in enumerate(q_lens):
        last = start // queries + s + max(0, q_len - 1) // queries
        start += q_len
        assert last < got.tiles, f"sequence {s} of {q_lens} needs tile {last} of {got.tiles}"
        assert last < start // queries + s + 1, f"sequence {s} of {q_lens} runs into the next one's tiles"
    kv_len = round(share * reach)
    split = max(MIN_SPLIT, -(-kv_len // MAX_SPLITS))  # as the kernel has it, from the sequence's own length
    assert 1 <= got.splits <= MAX_SPLITS and got.splits * split >= kv_len, "the last keys are in no program's split"
    assert got.padded_splits >= got.splits
