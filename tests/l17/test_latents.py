"""Lesson 17. Lesson 16's latents as rows: every kernel, both ways to read them, tiers, ranks and whole engines."""

import platform
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.reference import gather
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.latents import reading, store
from mini_engine.latents.cpu import call
from mini_engine.latents.reading import expanded_attention
from mini_engine.quantized import latents as row_latents
from mini_engine.quantized.formats import FORMATS, INT4, INT8
from mini_engine.quantized.pool import RowKvPool, bytes_per_token
from mini_engine.tiers.blocks import BlockBytes
from tests.l16.latent_cases import ROUNDED, TOLERANCE, LatentCase, latent_case
from tests.l16.models import BLOCK, LONG, ask, check_nothing_is_lost, drain, latents, model
from tests.l16.small import HEADS, NOPE, RANK, ROPE, V, attention, close, config_of, pool_of, randoms
from tests.support import OneOf, refused

pytestmark = pytest.mark.reference  # no task is about this

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
NAMES = ("reference", "blockwise", "torch", "cpu")
KERNELS = [f"{rows} {name}" for rows in FORMATS for name in NAMES]
CPP = [f"{rows} cpu" for rows in FORMATS]
EACH_KERNEL = pytest.mark.parametrize("kernel", KERNELS)
EACH_FORMAT = pytest.mark.parametrize("rows", [INT8, INT4], ids=lambda rows: rows.name)
TIERS = {"kv_host_bytes": 2**28, "kv_always": True}


def of_rows(kernel: str, case: LatentCase) -> LatentCase:
    """Return the case with caches of the rows that the kernel reads; the histories are what these stand for."""
    rows = FORMATS[kernel.partition(" ")[0]]
    sizes = 2.0 ** torch.randint(-2, 2, (*case.c_cache.shape[:3], 1), generator=torch.Generator().manual_seed(7))
    c, r = rows.write(case.c_cache.float() * sizes), rows.write(case.r_cache.float() / sizes)  # each its own scale
    widths = (case.q.shape[2], case.q_rope.shape[2])
    histories = [
        tuple(rows.read(gather(x, row, n), dim, torch.float32)[:, 0] for x, dim in zip((c, r), widths, strict=True))
        for row, n in zip(case.block_table, case.seq_lens_kv.tolist(), strict=True)
    ]
    return replace(case, c_cache=c, r_cache=r, histories=histories)


def run(kernel: str, case: LatentCase) -> torch.Tensor:
    rows, _, name = kernel.partition(" ")
    try:
        loaded = load_kernel(name, "cpu", case.q.dtype, rows, latents=True)
    except UserError as why:
        pytest.skip(f"NOT CHECKED: the {kernel} kernel; {why}")
    return loaded(*case.inputs)


def check(kernel, case, teach):
    out, dtype = run(kernel, case), case.q.dtype
    rounds = not kernel.endswith("cpu") or (dtype == torch.bfloat16 and kernel.startswith("int4"))  # q once rotated
    assert out.shape == case.q.shape and out.dtype == dtype, "the answer has q's shape and dtype"
    assert not out.isnan().any(), f"{teach}: NaN from padding, or from a slot that the sequence does not own"
    error = case.error_of(out)
    assert error < (ROUNDED if rounds else TOLERANCE)[dtype], f"{teach}: an error of {error:.2g} against float64"


# ---------------------------------------------------------------- kernels

MIXED = [(1, 9), (4, 4), (3, 8), (1, 1), (0, 5), (5, 14), (1, 70)]  # decodes, a prompt, chunks, no query
SHAPES = {
    "four heads": dict(heads=4, rank=32, rope=8, block_size=4),
    "widths that fill no vector": dict(heads=3, rank=20, rope=6, block_size=7),
    "more rotary than latent numbers": dict(heads=20, rank=33, rope=130, block_size=64),
    "DeepSeek-V3's widths": dict(heads=16, rank=512, rope=64, block_size=16),
}


@EACH_KERNEL
@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mixed_batch_gives_what_dense_attention_gives(kernel, shape, dtype):
    check(kernel, of_rows(kernel, latent_case(MIXED, dtype=dtype, **SHAPES[shape])), shape)


@EACH_KERNEL
@pytest.mark.parametrize("lengths", [[(1, 512), (1, 513), (2, 1025)], [(40, 600)]], ids=str)
def test_long_histories_give_what_dense_attention_gives(kernel, lengths):
    case = of_rows(kernel, latent_case(lengths, heads=3, rank=20, rope=6, block_size=16))
    check(kernel, case, f"(q_len, kv_len) {lengths}")


@st.composite
def cases(draw):
    kv_lens = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    return latent_case(
        [(draw(st.one_of(st.just(1), st.integers(0, kv_len))), kv_len) for kv_len in kv_lens],
        heads=draw(st.integers(1, 20)),
        rank=draw(st.integers(1, 80)),
        rope=draw(st.integers(1, 20).map(lambda half: 2 * half)),
        block_size=draw(st.integers(1, 64)),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        padding=draw(st.sampled_from([0, -1, 2**31 - 1])),
        padded_rows=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
    )


@EACH_KERNEL
@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_any_batch_gives_what_dense_attention_gives(kernel, case):
    case = of_rows(kernel, case)
    check(kernel, case, str(case))


@EACH_KERNEL
def test_what_a_sequence_does_not_own_changes_nothing(kernel):
    pair = (latent_case(MIXED, poison=value, block_size=6, padded_rows=0) for value in (1.0, float("nan")))
    clean, poisoned = (run(kernel, of_rows(kernel, case)) for case in pair)
    assert torch.equal(poisoned, clean), "the end of a last block, or another's block, must not affect an answer"


@pytest.mark.parametrize("name", NAMES)
def test_int8_rows_are_read_as_the_numbers_that_they_stand_for(name):
    case = of_rows("int8", latent_case(MIXED, rank=18, rope=6))  # rows of 20 + 4 and 8 + 4 bytes
    c, r = (INT8.unpack(x, dim, torch.float32) for x, dim in ((case.c_cache, 18), (case.r_cache, 6)))
    plain = load_kernel(name, latents=True)(*replace(case, c_cache=c, r_cache=r).inputs)
    assert torch.equal(run(f"int8 {name}", case), plain), "reading rows or their numbers gives the same bits"


@pytest.mark.parametrize("kernel", CPP)
@DTYPES
def test_batch_and_threads_change_no_bit(kernel, dtype):
    lengths = [(1, kv_len) for kv_len in (1, 32, 33, 513, 1100)] + [(90, 700)]
    case = of_rows(kernel, latent_case(lengths, heads=6, rank=40, rope=10, block_size=16, dtype=dtype))
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            outs.append(run(kernel, case))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outs[0], out) for out in outs[1:]), "the order of a sum depends on the number of threads"


@pytest.mark.nightly
@EACH_FORMAT
@DTYPES
@pytest.mark.parametrize("flags", ["", "-mavx2 -mfma"])
def test_in_cpp_other_processors_instructions_give_what_dense_attention_gives(rows, flags, dtype):
    if flags and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"NOT CHECKED: {flags}; this processor is of another kind")
    library = replace(row_latents.LIBRARY, flag_sets=(flags.split(),))
    function = library.function(f"latent_attention_{rows.name}", dtype)
    for shape in SHAPES:
        case = of_rows(rows.name, latent_case([*MIXED, (1, 600)], dtype=dtype, **SHAPES[shape]))
        q, q_rope, *rest = case.inputs
        out = rows.rotate(call(function, rows.rotate(q), rows.rotate(q_rope), *rest))
        assert case.error_of(out) < ROUNDED[dtype], f"{flags}, {shape}"


@pytest.mark.parametrize("kernel", CPP)
def test_a_kernel_refuses_other_rows(kernel):
    good = latent_case([(1, 6), (2, 3)], padded_rows=0)
    case, other = of_rows(kernel, good), of_rows("int4" if kernel.startswith("int8") else "int8", good)
    wrong = {
        "c_cache torch.float32": dict(c_cache=good.c_cache),
        "c_cache torch": dict(c_cache=other.c_cache),
        "16 torch": dict(q_rope=case.q.narrow(2, 0, 16)),
    }
    for values, change in wrong.items():
        with refused(ValueError, values):
            run(kernel, replace(case, **change))


def test_kernels_are_chosen_by_lesson_3s_names():
    assert load_kernel("auto", rows="int8", latents=True).name == OneOf("int8 latents cpu", "int8 latents torch")
    assert load_kernel("auto", rows="int4", latents=True).name == OneOf("int4 latents cpu", "int4 latents torch")
    with refused(UserError, "'triton' int4 auto reference blockwise"):
        load_kernel("triton", rows="int4", latents=True)
    with refused(UserError, "float32 bfloat16 torch.float16"):
        load_kernel("cpu", "cpu", torch.float16, "int8", latents=True)


# ---------------------------------------------------------------- expanded, pools, records


@EACH_FORMAT
def test_rows_are_widened_and_rotated_back_before_they_are_expanded(rows):
    pool = pool_of([(5, 9)], pack=lambda x, dim, dtype: rows.write(x.nan_to_num()))
    q, kv_b = randoms((5, HEADS, NOPE + ROPE), (HEADS, NOPE + V, RANK), seed=4)
    config, widen = config_of(), load_kernel("reference", rows=rows.name, latents=True).widen
    out = expanded_attention(q, (pool.c_cache, pool.r_cache), pool.table[0], 9, kv_b, config, widen)
    c, r = (rows.read(rows.write(x), x.shape[1], torch.float32) for x in pool.histories[0])
    close(out, attention(q, c, r, kv_b, config.attention_scale), "of rows, the vectors that they stand for")


@EACH_FORMAT
def test_a_pool_has_a_row_for_each_latent_and_each_rotary_key(rows):
    config = model().config
    pool = RowKvPool(rows, config, 5, BLOCK, load_kernel("reference", rows=rows.name, latents=True))
    widths = [rows.row_bytes(24), rows.row_bytes(8)]
    assert [x.shape[3] for x in (pool.K[0], pool.V[0])] == widths == {"int8": [28, 12], "int4": [16, 8]}[rows.name]
    assert pool.bytes == 5 * BLOCK * bytes_per_token(config, rows) == 5 * BLOCK * 3 * sum(widths)
    c, r = (torch.randn(3, 1, dim, generator=torch.Generator().manual_seed(dim)) for dim in (24, 8))
    pool.set_kv(1, torch.tensor([9, 4, 18]), c, r)
    for layers, x in ((pool.K, c), (pool.V, r)):
        assert torch.equal(layers[1].flatten(0, 1)[[9, 4, 18]], rows.write(x))
    with pytest.raises(ValueError):
        pool.set_kv(0, torch.tensor([5, 6, 7]), r, c)
    assert BlockBytes(*pool.parts).payload_bytes * 5 == pool.bytes, "a record is a block of rows"


# ---------------------------------------------------------------- engines


def answers(kv_dtype, **options):
    """Return the answers of an engine over latents, cold and then warm."""
    engine, found = latents(kv_dtype=kv_dtype, **options), []
    for when in ("cold", "warm"):
        requests = ask(engine, name=when)
        drain(engine)
        assert not any(request.error for request in requests), requests[0].error
        found.append([request.output_ids for request in requests])
    check_nothing_is_lost(engine)
    return found


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_expanded_and_absorbed_read_the_same_rows(kv_dtype, monkeypatch):
    monkeypatch.setattr(reading, "PIECE", 16)
    found = []
    for way in (True, False):
        monkeypatch.setattr(store, "expanding_pays", lambda *_, way=way: way)
        found.append(answers(kv_dtype))
    assert found[0] == found[1]


@pytest.mark.parametrize(("kv_dtype", "each"), [("int8", 24 + 4 + 8 + 4), ("int4", 12 + 4 + 4 + 4)])
def test_a_record_is_a_block_of_rows(kv_dtype, each):
    engine = latents(kv_dtype=kv_dtype, **TIERS)
    ask(engine, [LONG])
    drain(engine)
    records = engine.scheduler.manager.coordinator.connector.block_store.tiers.host.records.values()
    assert {len(record.payload) for record in records} == {3 * BLOCK * each}
