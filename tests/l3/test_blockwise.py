"""Lesson 3. The block-by-block kernel: each sequence reads its own blocks in place, through its table, and no other."""

from itertools import pairwise

import pytest
import torch

from mini_engine.attention.blockwise import paged_attention
from mini_engine.attention.contract import Batch
from tests.kernels.cases import int32, make_case
from tests.shared.new_memory import NewMemory
from tests.support import oracle

pytestmark = pytest.mark.task(7)

BLOCK_SIZE, KV_HEADS, DIM = 4, 2, 8


def batch(lengths, heads=4, dim=DIM):
    """Return packed queries of sequences with the given (q_len, kv_len), and a pool that is NaN outside their slots."""
    shape = dict(heads=heads, kv_heads=KV_HEADS, dim=dim, block_size=BLOCK_SIZE)
    case = make_case(lengths, **shape, entry=0, padded_rows=0)
    return *case.queries, *case.caches, *case.batch, [(k.float(), v.float()) for k, v in case.histories]


def attend(q, k_cache, v_cache, starts, lens, table, scale=DIM**-0.5):
    return paged_attention(q, k_cache, v_cache, Batch(starts, lens, table), scale)


def check(lengths, teach, **options):
    """Compare every sequence's rows with a plain float64 loop over its own keys."""
    q, k_cache, v_cache, starts, lens, table, histories = batch(lengths, **options)
    rows = [slice(begin, end) for begin, end in pairwise(starts.tolist())]
    expected = [oracle(q[mine], k, v) for mine, (k, v) in zip(rows, histories, strict=True)]
    queries = q.clone()
    out = attend(q, k_cache, v_cache, starts, lens, table)
    if out.isnan().any():
        out = attend(queries, k_cache.nan_to_num(), v_cache.nan_to_num(), starts, lens, table)
        still_nan = out.isnan().any()
        assert still_nan, "a sequence read a slot that it does not own: every such slot holds NaN here"
    for s, (mine, want, (k, v)) in enumerate(zip(rows, expected, histories, strict=True)):
        where = f"sequence {s} of {lengths} (q_len, kv_len): {teach}"
        close(out[mine], want, where, lambda mine=mine, k=k, v=v: likely(queries[mine], k, v, out[mine]))


def close(out, expected, teach, more=lambda: "", tolerance=1e-5):
    equal = torch.allclose(out.double(), expected, atol=tolerance, rtol=tolerance)
    teach = teach if equal else teach + more()
    off = f"largest difference {float((out - expected).abs().max()):.3g}, rounding is below {tolerance:f}".rstrip("0")
    assert equal, f"{teach}\n{off}"


def likely(q, k, v, out):
    """Name the usual mistake that gives this answer, if one does."""
    turns, diagonal = [h % KV_HEADS for h in range(q.shape[1])], len(k) - len(q)
    guesses = {
        "every query saw all keys, later tokens too": dense(q, k, v, len(k)),
        "the mask is off by one: each query saw one key too many, the next token's": dense(q, k, v, diagonal + 1),
        "the mask is off by one: each query saw one key too few, and missed its own": dense(q, k, v, diagonal - 1),
        "the mask is aligned to the top left, where a query sees too little": dense(q, k, v, 0),
        "query head h read key head h % H_kv": dense(q, k[:, turns], v[:, turns], diagonal),
        "no sum was rescaled when a later block had a larger score": stale(q, k, v, "total, values"),
        "the sum of values was not rescaled when a later block had a larger score": stale(q, k, v, "values"),
        "the sum of exp(score - largest) was not rescaled when a later block had a larger score": stale(
            q, k, v, "total"
        ),
        "the sum of values was not divided by the sum of exp(score - largest)": undivided(q, k, v),
        "only the last block was in the answer": dense(q, k[last_block(k)], v[last_block(k)], len(k)),
    }
    for name, guess in guesses.items():
        if torch.allclose(guess, out, atol=1e-5, equal_nan=True):
            return f"; here {name}"
    if out.isnan().any():
        return (
            "; here it is NaN, and not from a slot: is -inf subtracted from -inf, where a query sees no key of a block?"
        )
    return ""


def last_block(k):
    return slice((len(k) - 1) // BLOCK_SIZE * BLOCK_SIZE, None)


def scores_of(q, k, diagonal):
    """Return the scores `[H_q, q_len, kv_len]`, -inf where hidden: query i sees keys 0 … diagonal + i."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    seen = torch.ones(len(q), len(k)).tril(diagonal).bool()
    return (torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5).masked_fill(~seen, float("-inf"))


def mean(parts, v):
    """Return the values `[q_len, H_q, D]`, added up with `[H_q, q_len, kv_len]` parts."""
    return torch.einsum("hqk,khd->qhd", parts, v.repeat_interleave(len(parts) // v.shape[1], dim=1))


def dense(q, k, v, diagonal):
    return mean(scores_of(q, k, diagonal).softmax(-1), v)


def undivided(q, k, v):
    scores = scores_of(q, k, len(k) - len(q))
    return mean((scores - scores.amax(-1, keepdim=True)).exp(), v)


def stale(q, k, v, which):
    """Return the answer in which the sums named in `which` keep parts that are relative to an older largest score."""
    scores = scores_of(q, k, len(k) - len(q))
    largest = [x.amax(-1, keepdim=True).expand_as(x) for x in scores.split(BLOCK_SIZE, dim=-1)]
    old = (scores - torch.cat(largest, dim=-1).cummax(-1).values).exp()
    new = (scores - scores.amax(-1, keepdim=True)).exp()
    total = (old if "total" in which else new).sum(-1).T[..., None]
    return mean(old if "values" in which else new, v) / total


@pytest.mark.parametrize("kv_len", [1, 3, 4, 5, 8, 9])
def test_a_decode_sees_its_whole_history(kv_len):
    several = ", in every block" if kv_len > BLOCK_SIZE else ""
    check([(1, kv_len)], f"one query sees every key{several}")


@pytest.mark.parametrize("length", [1, 4, 7])
def test_a_prefill_is_causal(length):
    check([(length, length)], "query i sees keys 0 … i")


@pytest.mark.parametrize("q_len, kv_len", [(2, 9), (3, 4), (5, 6)])
def test_a_suffix_behind_a_history_keeps_its_causal_mask(q_len, kv_len):
    check([(q_len, kv_len)], "the mask is bottom-right: query i sees keys 0 … kv_len - q_len + i")


def test_table_entries_past_the_needed_ones_are_not_followed():
    q, k_cache, v_cache, starts, lens, table, _ = batch([(1, 9), (2, 2)])
    wild = table.clone()
    wild[1, 1:] = 10_000
    teach = "the second row of the table has entries past the needed blocks: stop after those that kv_len needs"
    try:
        out, again = (attend(q.clone(), k_cache, v_cache, starts, lens, x) for x in (table, wild))
    except (IndexError, RuntimeError) as error:
        error.add_note(teach)
        raise
    assert torch.equal(out, again), f"an entry past a sequence's blocks changed the answer. {teach}"


def test_sequences_of_every_kind_share_one_call():
    check(
        [(1, 9), (4, 4), (3, 8), (1, 1), (2, 6)], "each sequence reads its own keys, through its own row of the table"
    )


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_sums_are_rescaled_when_a_later_block_has_a_larger_score(order):
    q, k_cache, v_cache, starts, lens, table, [(k, v)] = batch([(1, 12)])
    heads = q.unflatten(1, (KV_HEADS, -1)).mean(2)[0]  # [H_kv, D]: a key along it has a large score in both heads
    strength = torch.arange(12.0) if order == "rising" else torch.arange(12.0).flip(0)
    k += heads * strength[:, None, None]
    k_cache[table[0, :3].long()] = k.unflatten(0, (3, BLOCK_SIZE))
    want = oracle(q, k, v)
    out = attend(q.clone(), k_cache, v_cache, starts, lens, table)
    teach = f"12 keys in three blocks, with {order} scores: when the largest score rises, all sums so far are rescaled"
    close(out, want, teach, lambda: likely(q, k, v, out))


def test_large_scores_do_not_overflow():
    q, k_cache, v_cache, starts, lens, table, [(k, v)] = batch([(1, 9)])
    out = attend(64 * q, k_cache, v_cache, starts, lens, table)
    teach = "scores beyond 88, whose exp is infinite in float32: subtract the largest score so far before exp"
    close(out, oracle(64 * q, k, v), teach, tolerance=1e-3)


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


def test_keys_and_values_are_read_in_place():
    *inputs, _ = batch([(1, 512)], heads=KV_HEADS, dim=64)
    with NewMemory(*inputs) as new:
        attend(*inputs)
    keys = 512 * KV_HEADS * 64 * 4  # bytes
    assert new.peak < keys / 2, (
        "the answer is right, but it was computed on a copy: attention over 512 keys allocated "
        f"{new.peak // 1024} KiB at one time, and all the keys are {keys // 1024} KiB. k_cache[block] with one id is a "
        "view and copies nothing; a list of ids, index_select, cat and stack copy"
    )
