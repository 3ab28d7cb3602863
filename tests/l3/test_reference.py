"""Lesson 3. The reference kernel: each sequence reads its own blocks, through its table, and nothing else."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

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


def attend(q, k_cache, v_cache, starts, lens, table, scale=DIM**-0.5):
    return paged_attention(q, k_cache, v_cache, starts, lens, table, scale)


def check(lengths, teach, **options):
    """Compare every sequence's rows with a plain float64 loop over its own keys."""
    q, k_cache, v_cache, starts, lens, table, histories = batch(lengths, **options)
    rows = [slice(begin, end) for begin, end in pairwise(starts.tolist())]
    expected = [oracle(q[mine], k, v) for mine, (k, v) in zip(rows, histories, strict=True)]
    queries = q.clone()
    out = attend(q, k_cache, v_cache, starts, lens, table)
    clean = not out.isnan().any()
    assert clean, "a sequence read a slot that it does not own: every such slot holds NaN here"
    for s, (mine, want, (k, v)) in enumerate(zip(rows, expected, histories, strict=True)):
        close(
            out[mine],
            want,
            f"sequence {s} of {lengths} (q_len, kv_len): {teach}{likely(queries[mine], k, v, out[mine])}",
        )


def close(out, expected, teach):
    equal = torch.allclose(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert equal, f"{teach}\nlargest difference {float((out - expected).abs().max()):.3g}, rounding is below 0.00001"


def likely(q, k, v, out):
    """Name the usual mistake that gives this answer, if one does."""
    turns = [h % KV_HEADS for h in range(q.shape[1])]
    right, top_left = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool(), torch.ones(len(q), len(k)).tril().bool()
    guesses = {
        "every query saw all keys, later tokens too": (k, v, None),
        "the mask is aligned to the top left, where a query sees too little": (k, v, top_left),
        "query head h read key head h % H_kv": (k[:, turns], v[:, turns], right),
    }
    for name, (keys, values, mask) in guesses.items():
        heads_first = (x.transpose(0, 1)[None] for x in (q, keys, values))
        guess = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        if torch.allclose(guess, out, atol=1e-5):
            return f"; here {name}"
    return ""


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


def test_the_scale_is_the_one_that_is_passed():
    q, k_cache, v_cache, starts, lens, table, histories = batch([(1, 5), (2, 2)])
    expected = torch.cat([oracle(3 * q[:1], *histories[0]), oracle(3 * q[1:], *histories[1])])
    out = attend(q, k_cache, v_cache, starts, lens, table, scale=3 * DIM**-0.5)
    close(out, expected, "`scale` multiplies q·k; it is usually D ** -0.5, and here it is three times that")


def test_the_answer_has_q_s_shape_and_dtype():
    q, k_cache, v_cache, starts, lens, table, _ = batch([(1, 5), (2, 2)])
    out = attend(q.bfloat16(), k_cache.bfloat16(), v_cache.bfloat16(), starts, lens, table)
    assert list(out.shape) == list(q.shape), "the answer is [T, H_q, D], as q is"
    assert out.dtype == torch.bfloat16, "the answer is in q's dtype"


def test_the_inputs_are_left_as_they_were():
    inputs = batch([(1, 5), (2, 2), (3, 9)])[:6]
    before = [x.clone() for x in inputs]
    attend(*inputs)
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q", "seq_lens_kv", "block_table")
    changed = [
        n for n, x, y in zip(names, inputs, before, strict=True) if not torch.equal(x.nan_to_num(), y.nan_to_num())
    ]
    assert changed == [], "attention reads; it writes to nothing but its own answer"


def test_rows_past_the_last_sequence_are_zero():
    q, k_cache, v_cache, starts, lens, table, _ = batch([(1, 5), (2, 2)])
    padded = torch.cat([q, torch.full((3, *q.shape[1:]), float("nan"))])
    out = attend(padded, k_cache, v_cache, starts, lens, table)
    assert list(out.shape) == list(padded.shape), "the answer has a row for each row of q"
    zeros = not out[3:].any()
    assert zeros, "rows of q past cu_seqlens_q[-1] belong to no sequence and give zeros"
    assert torch.equal(out[:3], attend(q, k_cache, v_cache, starts, lens, table)), "padded rows change no other row"


@pytest.mark.parametrize("kv_len", [0, 4])
def test_a_sequence_without_queries_is_skipped(kv_len):
    q, k_cache, v_cache, starts, lens, table, _ = batch([(1, 5), (2, 2)])
    starts, lens = int32([0, 1, 1, 3]), int32([5, kv_len, 2])
    table = torch.stack([table[0], torch.full_like(table[0], -1), table[1]])
    why = "a sequence without queries changes no answer, and its table is not followed"
    try:
        out = attend(q, k_cache, v_cache, starts, lens, table)
    except (IndexError, RuntimeError) as error:
        error.add_note(f"its row of the table holds -1: {why}")
        raise
    alone = attend(q, k_cache, v_cache, int32([0, 1, 3]), int32([5, 2]), table[[0, 2]])
    assert torch.equal(out, alone), why


def test_table_entries_past_the_needed_ones_are_not_followed():
    q, k_cache, v_cache, starts, lens, table, _ = batch([(1, 9), (2, 2)])
    wild = table.clone()
    wild[1, 1:] = 10_000
    out, teach = attend(q, k_cache, v_cache, starts, lens, table), "stop after the blocks that kv_len needs"
    try:
        again = attend(q, k_cache, v_cache, starts, lens, wild)
    except (IndexError, RuntimeError) as error:
        error.add_note(f"the table's row has 10000 past the needed blocks, and it was followed: {teach}")
        raise
    assert torch.equal(out, again), f"table entries past a sequence's blocks changed the answer: {teach}"
