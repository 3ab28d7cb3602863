"""Lesson 3. The reference kernel: each sequence reads its own blocks, through its table, and nothing else."""

import pytest
import torch

from mini_engine.attention.reference import paged_attention
from tests.support import oracle

BLOCK_SIZE, KV_HEADS, DIM = 4, 2, 8


def int32(data):
    return torch.tensor(data, dtype=torch.int32)


def batch(lengths, heads=4, seed=0):
    """Return packed queries of sequences with the given (q_len, kv_len), and a pool that is NaN outside their slots."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-kv_len // BLOCK_SIZE) for _, kv_len in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    k_cache = torch.full((sum(counts) + 1, BLOCK_SIZE, KV_HEADS, DIM), float("nan"))
    v_cache = k_cache.clone()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    histories = []
    for s, ((_, kv_len), count) in enumerate(zip(lengths, counts, strict=True)):
        blocks, order = order[:count], order[count:]
        table[s, :count] = int32(blocks)
        k, v = (torch.randn(kv_len, KV_HEADS, DIM, generator=generator) for _ in range(2))
        slots = torch.tensor([blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(kv_len)])
        k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots] = k, v
        histories.append((k, v))
    q = torch.randn(sum(q_len for q_len, _ in lengths), heads, DIM, generator=generator)
    starts = [0]
    for q_len, _ in lengths:
        starts.append(starts[-1] + q_len)
    return q, k_cache, v_cache, int32(starts), int32([kv for _, kv in lengths]), table, histories


def attend(q, k_cache, v_cache, starts, lens, table):
    return paged_attention(q, k_cache, v_cache, starts, lens, table, DIM**-0.5)


def check(lengths, teach, **options):
    q, k_cache, v_cache, starts, lens, table, histories = batch(lengths, **options)
    out = attend(q, k_cache, v_cache, starts, lens, table)
    assert not out.isnan().any(), "a sequence read a slot that it does not own"
    for s, (k, v) in enumerate(histories):
        mine = slice(int(starts[s]), int(starts[s + 1]))
        torch.testing.assert_close(
            out[mine].double(),
            oracle(q[mine], k, v),
            atol=1e-5,
            rtol=1e-5,
            msg=lambda m, s=s: f"sequence {s} of {lengths} (q_len, kv_len): {teach}. {m}",
        )


@pytest.mark.parametrize("kv_len", [1, 3, 4, 5, 8, 9])
def test_a_decode_sees_its_whole_history(kv_len):
    check([(1, kv_len)], "one query sees every key")


@pytest.mark.parametrize("length", [1, 4, 7])
def test_a_prefill_is_causal(length):
    check([(length, length)], "query i sees keys 0 … i")


@pytest.mark.parametrize("q_len, kv_len", [(2, 9), (3, 4), (5, 6)])
def test_a_suffix_behind_a_history_keeps_its_causal_mask(q_len, kv_len):
    check([(q_len, kv_len)], "the mask is bottom-right: query i sees keys 0 … kv_len - q_len + i")


def test_sequences_of_every_kind_share_one_call():
    check(
        [(1, 9), (4, 4), (3, 8), (1, 1), (2, 6)], "each sequence reads its own keys, through its own row of the table"
    )


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_query_heads_share_key_heads(heads):
    check([(3, 5), (1, 6)], "query head h reads key head h // group", heads=heads)


def test_rows_past_the_last_sequence_are_zero():
    q, k_cache, v_cache, starts, lens, table, _ = batch([(1, 5), (2, 2)])
    padded = torch.cat([q, torch.full((3, *q.shape[1:]), float("nan"))])
    out = attend(padded, k_cache, v_cache, starts, lens, table)
    assert out.shape == padded.shape and not out[3:].any(), "padded rows give zeros"
    assert torch.equal(out[:3], attend(q, k_cache, v_cache, starts, lens, table)), "padded rows change no other row"


def test_a_sequence_without_queries_is_skipped():
    q, k_cache, v_cache, starts, lens, table, _ = batch([(1, 5), (2, 2)])
    starts, lens = int32([0, 1, 1, 3]), int32([5, 0, 2])
    table = torch.stack([table[0], torch.full_like(table[0], -1), table[1]])
    out = attend(q, k_cache, v_cache, starts, lens, table)
    assert not out.isnan().any(), "an empty sequence's table must not be followed"


def test_table_entries_past_the_needed_ones_are_not_followed():
    q, k_cache, v_cache, starts, lens, table, _ = batch([(1, 9), (2, 2)])
    wild = table.clone()
    wild[1, 1:] = 10_000
    out = attend(q, k_cache, v_cache, starts, lens, table)
    assert torch.equal(out, attend(q, k_cache, v_cache, starts, lens, wild))
