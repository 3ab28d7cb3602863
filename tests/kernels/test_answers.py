"""Course machinery. Every kernel's answers are float64's: any lengths, shapes, windows, tables, shared beginnings."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.contract import EVERY_KEY
from tests.kernels.cases import MIXED, NAN, crowd
from tests.kernels.table import DTYPES

SHAPES = {  # dim is the width of a head, or of a latent; only latents have a rotary part
    "two queries a key head": dict(heads=4, kv_heads=2, dim=32, rope=8, block_size=4),
    "one query a key head, blocks of 1": dict(heads=2, kv_heads=2, dim=64, rope=4, block_size=1),
    "five queries a key head, three groups of 32, blocks of 7": dict(
        heads=15, kv_heads=3, dim=96, rope=6, block_size=7
    ),
    "sixteen queries a key head": dict(heads=16, kv_heads=1, dim=80, rope=40, block_size=16),
    "widths that fill no vector, padded rows": dict(heads=4, kv_heads=2, dim=18, rope=6, block_size=3),
    "widths below a vector": dict(heads=5, kv_heads=1, dim=8, rope=2, block_size=5),
    "more rotary than latent numbers": dict(heads=20, kv_heads=4, dim=33, rope=130, block_size=64),
    "Qwen3's heads": dict(heads=4, kv_heads=2, dim=128, rope=64, block_size=16),
    "a block longer than any history": dict(heads=6, kv_heads=2, dim=256, rope=64, block_size=256),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mixed_batch(kernel, shape, dtype):
    for window in kernel.windows(EVERY_KEY, 6, 17):
        kernel.check(kernel.case(MIXED, window=window, dtype=dtype, **SHAPES[shape]), shape)


def test_triton_s_kernels(triton):
    for window in (EVERY_KEY, 6):
        triton.check(triton.case(MIXED, window=window, block_size=7), "tiles of a mixed batch")
    for window in (EVERY_KEY, 520):
        case = triton.case(SPLIT[1], heads=2, kv_heads=1, block_size=16, window=window)
        triton.check(case, "a decode's history in splits")


@pytest.mark.parametrize("lengths", [((1, 9), (1, 40), (1, 2)), ((2, 9), (0, 5))], ids=str)
def test_as_many_rows_as_sequences(kernel, lengths, dtype):
    """As in a step of decodes without padding, or so it seems."""
    for window in kernel.windows(EVERY_KEY, 6):
        options = dict(window=window, dtype=dtype, block_size=6, padded_rows=0, entry=10**6)
        kernel.check(kernel.case(lengths, **options), "a step without padding")


LONG = [
    ((1, 1300), (1, 3)),
    ((40, 600),),
    ((530, 530), (1, 700)),
    ((70, 1100), (1, 1025)),
    ((1, 512), (1, 513), (2, 1025), (0, 0)),
]


@pytest.mark.parametrize("lengths", LONG, ids=str)
def test_histories_of_several_stretches(quick, lengths, dtype):
    for window in quick.windows(EVERY_KEY, 513):
        shape = dict(heads=6, kv_heads=3, dim=40, rope=10, block_size=16)
        quick.check(quick.case(lengths, window=window, dtype=dtype, **shape), "histories longer than a stretch")


SPLIT = [((1, 9000), (1, 3)), ((3, 340), (1, 800), (0, 0), (1, 257), (2, 2))]


@pytest.mark.parametrize("lengths", SPLIT, ids=str)
def test_a_decode_is_split_and_merged(kernel, lengths):
    for window in kernel.windows(EVERY_KEY, 300, 520):  # 2 and 3 splits, of which Triton merges 2 and 4
        kernel.check(kernel.case(lengths, heads=2, kv_heads=1, block_size=16, window=window), "a history in splits")


@pytest.mark.parametrize("heads, dim, rope", [(128, 512, 64), (40, 16, 4)], ids=["DeepSeek-V3", "Falcon's group"])
def test_many_heads_share_one_head_of_keys(quick, heads, dim, rope):
    case = quick.case([(1, 90), (2, 40)], heads=heads, kv_heads=1, dim=dim, rope=rope, block_size=16)
    quick.check(case, f"{heads} rows of a query fill a task of the C++ kernels")


def test_a_batch_without_sequences_gives_zeros(kernel):
    kernel.check(kernel.case([], padded_rows=3), "no sequence")


@st.composite
def cases(draw, kernel):
    group, kv_heads = draw(st.integers(1, 16)), draw(st.integers(1, 4))
    kv_lens = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    block_size = draw(st.integers(1, 20))
    lengths = [(draw(st.one_of(st.just(1), st.integers(0, kv_len))), kv_len) for kv_len in kv_lens]
    return kernel.case(
        lengths,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 16, 18, 24, 32, 40, 48, 64, 80, 128])),
        rope=2 * draw(st.integers(1, 20)),
        block_size=block_size,
        dtype=draw(st.sampled_from(DTYPES)),
        window=draw(st.sampled_from(kernel.windows(EVERY_KEY, 160, 33, block_size + 1, block_size, 3, 1))),
        shared=tuple((draw(st.integers(0, 2)), draw(st.integers(0, 9))) for _ in kv_lens),
        poison=draw(st.sampled_from([NAN, float("inf"), -float("inf"), 1e4])),
        entry=draw(st.sampled_from([0, -1, 10**6, 2**31 - 1])),
        padded_rows=draw(st.integers(0 if any(q_len for q_len, _ in lengths) else 1, 3)),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("examples", [25, pytest.param(400, marks=pytest.mark.nightly)])
def test_any_batch(quick, examples):
    @settings(max_examples=examples)
    @given(case=cases(quick))
    def holds(case):
        quick.check(case, "any batch")

    holds()


# ---------------------------------------------------------------- a crowd: what is read once for many changes nothing


def check_crowd(kernel, case):
    """Compare with float64 and, in C++, with the bits that each sequence gets alone."""
    kernel.check(case, "a crowd that shares its beginning")
    out = kernel(case)
    for s, rows in enumerate(case.rows if kernel.name == "cpu" else []):
        assert torch.equal(out[rows], kernel(case.part(s))), f"sequence {s} rounds otherwise in a crowd, of {case}"


def test_a_crowd_behind_96_shared_keys(quick, dtype):
    """Every query sees each shared key in the longer windows, and the first ones leave the shorter window midway."""
    for window in quick.windows(EVERY_KEY, 128, 110):
        options = crowd(100, 96, seed=1, block_size=16) | dict(heads=4, kv_heads=2, dim=16, rope=4, dtype=dtype)
        check_crowd(quick, quick.case(window=window, **options))


@st.composite
def crowds(draw, kernel):
    keys = draw(st.sampled_from([96, 130, 64, 200, 40, 520]), "shared keys")
    heads, kv_heads = draw(st.sampled_from([(4, 2), (4, 4), (8, 1), (6, 3), (32, 1)]))
    count = draw(st.sampled_from([100, 50, 12, 3])) if keys < 500 else 12
    return kernel.case(
        **crowd(count, keys, draw(st.integers(0, 10**6)), draw(st.sampled_from([16, 4, 7, 1, 32]))),
        heads=heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([16, 32, 40])),
        dtype=draw(st.sampled_from(DTYPES)),
        window=draw(st.sampled_from(kernel.windows(EVERY_KEY, *(keys + more for more in (5, 14, 30, 50)), 70))),
    )


def check_crowds(kernel, max_examples):
    @settings(max_examples=max_examples)
    @given(case=crowds(kernel))
    def holds(case):
        check_crowd(kernel, case)

    holds()


def test_any_crowd(cpp):
    check_crowds(cpp, 20)


@pytest.mark.nightly
def test_any_of_many_crowds(quick):
    check_crowds(quick, 150)


# ---------------------------------------------------------------- which keys count


@pytest.mark.parametrize("part", [0, 1], ids=["key or latent", "value or rotary key"])
def test_a_query_sees_its_window_up_to_its_own_key_and_no_other(kernel, part):
    """Of 9 tokens in blocks of 4, each changes in turn: which queries of a decode and of a chunk of 4 notice?"""
    for window in kernel.windows(EVERY_KEY, 3, 4):
        case = kernel.case([(1, 9), (4, 9)], window=window, padded_rows=0)
        before, positions = kernel(case), (8, 5, 6, 7, 8)
        for key in range(9):
            changed = replace(case, caches=tuple(x.clone() for x in case.caches))
            another = 7 if key == 8 else 8
            for row in case.batch.block_table:
                if row[key // 4] > 0:
                    changed.caches[part][row[key // 4], key % 4] = case.caches[part][row[another // 4], another % 4]
            differs = [not torch.equal(*pair) for pair in zip(before, kernel(changed), strict=True)]
            seen = [position - window < key <= position for position in positions]
            assert differs == seen, f"queries at {positions} with a window of {window}, when token {key} changes"


def test_a_window_that_hides_nothing_changes_no_bit(kernel, dtype):
    case = kernel.case(MIXED, dtype=dtype)
    for window in kernel.windows(75, 100):
        assert torch.equal(kernel(replace(case, window=window)), kernel(case)), f"a window of {window}, 75 keys"
