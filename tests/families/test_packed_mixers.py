"""Course machinery. A mixer with a state in one call writes and returns what the store's own calls would."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.families.lfm3_fast import FastShortConv
from mini_engine.hybrid.fast import FastDeltaNet
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.model import GatedDeltaNet
from mini_engine.hybrid.short_conv import ShortConv
from mini_engine.hybrid.store import HybridKv
from mini_engine.kv.block_tensor import KvPool, KvShape
from mini_engine.layers import native
from mini_engine.layers.fast_model import join_packed
from mini_engine.layers.torch_layers import FastNorm
from mini_engine.model.layers import RMSNorm
from tests.shared.compiled import needs_compiler
from tests.shared.hybrids import both, plan_of
from tests.support import refused, with_random_weights

HIDDEN, CHANNELS, TAPS = 72, 100, 5  # no multiples of a register's width
NET = dataclasses.replace(both("every fourth attends")[0].config, hidden_size=HIDDEN, linear_value_head_dim=37)
SLOTS = [[4, 2, 6], [1], [3, 5]]
PLANS = {
    "a token each": ((1, 1, 1), [[4], [1], [6]]),
    "prompts of one part and of several": ((9, 150, 1), [[4], [1], [6]]),
    "drafts beside a prompt": ((3, 65, 2), SLOTS),
}
KINDS = {
    "a delta net": (lambda: GatedDeltaNet(NET, 1), FastDeltaNet),
    "a short convolution": (lambda: ShortConv(HIDDEN, CHANNELS, TAPS, False, 1), FastShortConv),
    "a short convolution with biases": (lambda: ShortConv(HIDDEN, CHANNELS, TAPS, True, 1), FastShortConv),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
pytestmark = [needs_compiler, pytest.mark.reference]  # no task is about this


def layer_of(kind, dtype=torch.float32):
    """Return a mixer behind its norm, over packed matrices."""
    make, fast = KINDS[kind]
    parts: Any = torch.nn.ModuleDict({"norm": RMSNorm(HIDDEN, 1e-6), "mixer": make()})
    parts = with_random_weights(parts).to(dtype)
    return fast(parts["mixer"], FastNorm(parts["norm"]), partial(join_packed, native.Functions(dtype)))


def store_of(kind, dtype=torch.float32, layers=2, taps=TAPS):
    """Return a store with random states."""
    kv = KvPool(KvShape(1, (1, 8), (1, 8)), 2, 16, load_kernel("reference"), dtype)
    pool = GdnPool(6, layers, 0, 0, 0, CHANNELS, taps, dtype=dtype)
    if "net" in kind:
        pool = GdnPool.for_model(NET, 6, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for states in (pool.recurrent_state, pool.conv_state):
        states.normal_(generator=generator)
    return HybridKv(kv, pool)


def run(layer, x, store, plan):
    """Return the layer's result in a step with this plan; the next layer would overwrite it."""
    return layer(x, x, x, store.in_step(plan), plan).clone()


def rows(count, dtype=torch.float32):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


def same_states(one, other, same=torch.equal):
    states = ((store.states.recurrent_state, store.states.conv_state) for store in (one, other))
    return all(same(*pair) for pair in zip(*states, strict=True))


@each_kind
@each_dtype
@pytest.mark.parametrize("plan", PLANS)
def test_one_call_writes_and_returns_what_the_store_s_own_calls_do(kind, dtype, plan, monkeypatch):
    lengths, slots = PLANS[plan]
    layer, (store, other) = layer_of(kind, dtype), (store_of(kind, dtype) for _ in range(2))
    x, meta = rows(sum(lengths), dtype), plan_of(*lengths, slots=slots)
    want = layer(x, x, x, other, meta)
    for name in ("scan", "convolve"):
        monkeypatch.setattr(HybridKv, name, None)
    got = run(layer, x, store, meta)
    if "net" not in kind:
        assert torch.equal(got, want) and same_states(store, other)
    close = partial(torch.allclose, **dict.fromkeys(("atol", "rtol"), 1e-5 if dtype == torch.float32 else 3e-2))
    assert close(got, want) and same_states(store, other, close)


@each_kind
@each_dtype
@pytest.mark.parametrize("chunk", [1, 7, 65])
def test_a_sequence_s_bits_are_the_same_in_chunks_and_alone_and_on_one_thread(kind, dtype, chunk, torch_threads):
    layer, (alone, batched), x = layer_of(kind, dtype), (store_of(kind, dtype) for _ in range(2)), rows(200, dtype)
    together = run(layer, x, batched, plan_of(33, 150, 17, slots=[[2], [4], [1]]))[33:183]
    torch.set_num_threads(1)
    parts = [run(layer, part, alone, plan_of(len(part), slots=[[4]])) for part in x[33:183].split(chunk)]
    assert torch.equal(torch.cat(parts), together)
    for name in ("recurrent_state", "conv_state"):
        assert torch.equal(getattr(alone.states, name)[1, 4], getattr(batched.states, name)[1, 4]), name


@pytest.mark.parametrize(
    ("x", "options", "slots", "values"),
    [
        (rows(2)[:, :-1], {}, [[1], [2]], f"{HIDDEN - 1} {HIDDEN}"),
        (rows(2).bfloat16(), {}, [[1], [2]], "bfloat16 float32"),
        (rows(3), {}, [[1], [2]], "3 2"),
        (rows(2), {}, [[1], [7]], "7 6"),
        (rows(2), dict(layers=1), [[1], [2]], "1"),
        (rows(2), dict(taps=TAPS + 1), [[1], [2]], f"{TAPS} {TAPS - 1}"),
    ],
    ids=["narrow rows", "another dtype", "a row too many", "a slot", "a layer too few", "other states"],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(x, options, slots, values):
    kind = "a short convolution"
    layer, store, untouched = layer_of(kind), store_of(kind, **options), store_of(kind, **options)
    with refused(ValueError, values):
        run(layer, x, store, plan_of(1, 1, slots=slots))
    assert same_states(store, untouched)
