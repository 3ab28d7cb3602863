"""Course machinery. Attention in one call over a direct store writes and returns what the store's calls would."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mini_engine.attention.registry import load_kernel
from mini_engine.families.lfm3_fast import FastHeadGatedAttention
from mini_engine.families.lfm3_model import HeadGatedAttention
from mini_engine.hybrid.fast import FastGatedAttention
from mini_engine.hybrid.model import GatedAttention
from mini_engine.kv.block_tensor import ForwardMeta, KvPool, KvShape
from mini_engine.layers import native
from mini_engine.layers.direct_step import in_step
from mini_engine.layers.fast_model import join_packed
from mini_engine.layers.torch_layers import FastNorm, TorchAttention
from mini_engine.model.layers import RMSNorm
from mini_engine.model.qwen3 import Qwen3Attention
from tests.shared.compiled import needs_compiler
from tests.support import refused, with_random_weights

BLOCK, NUM_BLOCKS, LAYERS = 4, 20, 2
HIDDEN, DIM, TURNED = 72, 40, 24  # no multiples of a register's width
FED, LENGTHS = (5, 1, 9), (11, 7, 9)  # a chunk behind a history, a decode, a prompt
CONFIG: Any = SimpleNamespace(
    hidden_size=HIDDEN,
    head_dim=DIM,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    attention_bias=True,
)
KINDS = {
    "no gate": (partial(Qwen3Attention, CONFIG, 1), TorchAttention, DIM),
    "a gate for each head": (partial(HeadGatedAttention, CONFIG, 1, 1), FastHeadGatedAttention, DIM),
    "a gate for each element": (partial(GatedAttention, CONFIG, 1), FastGatedAttention, TURNED),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
pytestmark = [needs_compiler, pytest.mark.reference]  # no task is about this


def layers_of(kind, dtype=torch.float32):
    """Return lesson 0's form of a layer behind its norm, and the packed form."""
    make, fast, _ = KINDS[kind]
    parts: Any = torch.nn.ModuleDict({"norm": RMSNorm(HIDDEN, 1e-6), "mixer": make()})
    parts = with_random_weights(parts).to(dtype)
    slow = copy.deepcopy(parts)
    functions = native.Functions(dtype)
    return slow, fast(parts["mixer"], FastNorm(parts["norm"]), partial(join_packed, functions))


def plan(fed=FED, lengths=LENGTHS, first=0):
    """Plan to feed the last fed[s] of lengths[s] tokens. first: a sequence's number, which decides its blocks."""
    table = torch.arange(1, 10).view(3, 3)[first : first + len(fed)].int()
    positions = torch.cat([torch.arange(n - f, n) for n, f in zip(lengths, fed, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(fed)), torch.tensor(fed))
    slots = table[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
    starts = F.pad(torch.tensor(fed).cumsum(0), (1, 0)).int()
    return ForwardMeta(positions, slots, starts, torch.tensor(lengths).int(), table, BLOCK)


def pool_of(dtype=torch.float32, layers=LAYERS, heads=2):
    """Return a pool of random histories."""
    pool = KvPool(
        KvShape(layers, (heads, DIM), (heads, DIM)), NUM_BLOCKS, BLOCK, load_kernel("cpu", dtype=dtype), dtype
    )
    generator = torch.Generator().manual_seed(1)
    for x in (*pool.K, *pool.V):
        x.normal_(generator=generator)
    return pool


def inputs(kind, meta, dtype=torch.float32):
    """Return x and the angles of its rows; those of a token depend only on its position."""
    generator, turned = torch.Generator().manual_seed(2), KINDS[kind][2]
    x = torch.randn(BLOCK * NUM_BLOCKS, HIDDEN, generator=generator)[meta.slot_mapping].to(dtype)
    angles = meta.positions[:, None] * torch.rand(turned // 2, generator=generator)
    cos, sin = (part.repeat(1, 2).to(dtype) for part in (angles.cos(), angles.sin()))
    return (x, cos, sin) if "head" not in kind else (x, torch.stack([sin, cos]), torch.stack([cos, sin]))


def same(got, want, close):
    torch.testing.assert_close(got, want, atol=close, rtol=close)


@each_kind
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_one_call_writes_and_returns_what_the_store_s_own_calls_do(kind, dtype, close, monkeypatch):
    slow, fast = layers_of(kind, dtype)
    meta, (pool, other, theirs) = plan(), (pool_of(dtype) for _ in range(3))
    x, cos, sin = inputs(kind, meta, dtype)
    want = fast(x, cos, sin, other, meta)
    monkeypatch.setattr(pool, "set_kv", None)
    got = fast(x, cos, sin, in_step(pool, meta), meta)
    same(got, want, close)
    assert all(torch.equal(*pair) for pair in zip((*pool.K, *pool.V), (*other.K, *other.V), strict=True))
    if dtype == torch.float32:
        same(fast.out(got), slow.mixer(slow.norm(x), cos, sin, theirs, meta), 1e-4)
        for mine, its in zip((*pool.K, *pool.V), (*theirs.K, *theirs.V), strict=True):
            same(mine, its, 1e-5)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_s_bits_are_the_same_alone_and_on_one_thread(kind, dtype):
    _, fast = layers_of(kind, dtype)

    def run(meta):
        return fast(*inputs(kind, meta, dtype), in_step(pool_of(dtype), meta), meta).clone()

    together, threads = run(plan()), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [run(plan(FED[s : s + 1], LENGTHS[s : s + 1], s)) for s in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(alone), together)


def changed(meta, name, at, value):
    tensor = getattr(meta, name).clone()
    tensor[at] = value
    return ForwardMeta(**dict(vars(meta), **{name: tensor}))


@pytest.mark.parametrize(
    ("change", "options", "values"),
    [
        (lambda meta: changed(meta, "slot_mapping", 3, NUM_BLOCKS * BLOCK), {}, f"{NUM_BLOCKS * BLOCK}"),
        (lambda meta: changed(meta, "block_table", (1, 1), NUM_BLOCKS), {}, f"1 {NUM_BLOCKS - 1}"),
        (lambda meta: changed(meta, "seq_lens_kv", 2, 13), {}, "2 13 12"),
        (lambda meta: meta, dict(layers=1), "1 1"),
        (lambda meta: meta, dict(heads=1), "1 2"),
    ],
    ids=["a slot", "a block", "a length", "too few layers", "too few heads"],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(change, options, values):
    _, fast = layers_of("no gate")
    pool, untouched, meta = pool_of(**options), pool_of(**options), plan()
    x, cos, sin = inputs("no gate", meta)
    with refused(ValueError, values):
        fast(x, cos, sin, in_step(pool, change(meta)), meta)
    assert all(torch.equal(*pair) for pair in zip((*pool.K, *pool.V), (*untouched.K, *untouched.V), strict=True))


@pytest.mark.parametrize(
    ("cut", "values"),
    [
        (lambda x: x[:-1], "14 15"),
        (lambda x: x.T.contiguous().T, f"15 {DIM}"),
        (lambda x: x.repeat(1, 2), f"{2 * DIM}"),
    ],
    ids=["too few", "strides", "too wide"],
)
def test_angles_that_do_not_fit_are_refused_before_anything_is_written(cut, values):
    _, fast = layers_of("no gate")
    pool, untouched, meta = pool_of(), pool_of(), plan()
    x, cos, sin = inputs("no gate", meta)
    with refused(ValueError, values):
        fast(x, cut(cos), cut(sin), in_step(pool, meta), meta)
    assert torch.equal(pool.K[1], untouched.K[1])
