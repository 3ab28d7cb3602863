"""Lesson 11. A delta net in one call equals torch's, whatever is beside a sequence, and refuses what does not fit."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from mini_engine.hybrid.fast import FastDeltaNet
from mini_engine.hybrid.model import GatedDeltaNet
from mini_engine.hybrid.store import feeds_of
from mini_engine.layers import native
from mini_engine.layers.fast_model import join_packed
from mini_engine.layers.torch_layers import FastNorm
from mini_engine.model.layers import RMSNorm
from tests.shared.compiled import needs_compiler
from tests.shared.hybrids import SELECTED, both, plan_of, store_of
from tests.support import with_random_weights

FAMILY = "every fourth attends"
pytestmark = needs_compiler
# the norm behind a state's sums enlarges their rounding where they are small
each_dtype = pytest.mark.parametrize("dtype, close", [(torch.float32, 5e-5), (torch.bfloat16, 3e-2)])
WIDER = {"linear_value_head_dim": 137}  # than the registers, and no multiple of them
PLANS = {
    "a token each": plan_of(1, 1, 1, slots=[[4], [1], [6]]),
    "prompts of one part and of several": plan_of(9, 150, 1, slots=[[4], [1], [6]]),
    "drafts beside a prompt": plan_of(3, 65, 2, slots=[[4, 2, 6], [1], [3, 5]]),
}


def last_layer(config, dtype):
    """Return a model's last delta net behind its norm, over packed matrices."""
    net, norm = GatedDeltaNet(config, config.num_gdn_layers - 1), RMSNorm(config.hidden_size, 1e-6)
    parts: Any = with_random_weights(torch.nn.ModuleDict({"norm": norm, "net": net})).to(dtype)
    return FastDeltaNet(parts["net"], FastNorm(parts["norm"]), partial(join_packed, native.Functions(dtype)))


def full_store(config, dtype=torch.float32):
    """Return a store of 6 states with random numbers, always the same."""
    store, generator = store_of(config, 6, dtype), torch.Generator().manual_seed(1)
    for states in (store.states.recurrent_state, store.states.conv_state):
        states.normal_(generator=generator)
    return store


def some_rows(config, count, dtype=torch.float32):
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(2)).to(dtype)


def run(layer, x, store, plan):
    """Return the layer's result in a step with this plan; the next layer would overwrite it."""
    return layer(x, None, None, store.in_step(plan), plan).clone()


@pytest.mark.parametrize("family", SELECTED)
@each_dtype
@pytest.mark.parametrize("wider", [{}, WIDER], ids=["", "wider than the registers"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_scan_in_cpp_equals_torch_s(family, wider, plan, dtype, close):
    config = dataclasses.replace(both(family)[0].config, **wider)
    layer, fast, ours = last_layer(config, dtype), full_store(config, dtype), full_store(config, dtype)
    touched = {s for feed in feeds_of(plan) for s in feed.slots.tolist()}
    others = [s for s in range(ours.states.num_slots) if s not in touched]
    before = fast.states.recurrent_state[:, others].clone()
    x, close = some_rows(config, len(plan.positions), dtype), partial(torch.allclose, atol=close, rtol=close)
    for _ in range(2):
        want = layer(x, None, None, ours, plan)  # no `in_step`: the store advances its states
        assert close(run(layer, x, fast, plan), want)
    assert torch.equal(ours.states.conv_state, fast.states.conv_state), "the last inputs are kept as they are"
    assert close(fast.states.recurrent_state, ours.states.recurrent_state)
    assert torch.equal(fast.states.recurrent_state[:, others], before), "no other slot may change"


@each_dtype
@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 150])
def test_a_sequence_gets_the_same_bits_in_any_chunks_and_beside_others(dtype, close, chunk):
    config = dataclasses.replace(both(FAMILY)[0].config, **WIDER)
    layer, alone, batched = last_layer(config, dtype), full_store(config, dtype), full_store(config, dtype)
    x = some_rows(config, 200, dtype)  # 150 tokens of ours, with neighbours around them
    together = run(layer, x, batched, plan_of(33, 150, 17, slots=[[2], [4], [1]]))[33:183]
    parts = [run(layer, part, alone, plan_of(len(part), slots=[[4]])) for part in x[33:183].split(chunk)]
    assert torch.equal(torch.cat(parts), together), "where a chunk ends, or a neighbour, changed a sequence's output"
    for name in ("recurrent_state", "conv_state"):
        assert torch.equal(getattr(alone.states, name)[-1, 4], getattr(batched.states, name)[-1, 4]), name


@pytest.mark.parametrize(
    ("tokens", "lengths", "slots"),
    [
        (2, (1, 1), [[1], [7]]),
        (2, (1, 1), [[1], [-1]]),
        (10, (9, 1), [[7], [1]]),
        (3, (1, 1), [[1], [2]]),
        (2, (3, 1), [[1], [2]]),
    ],
    ids=["a slot too high", "a slot below 0", "a prompt's slot", "a row too many", "two rows too few"],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tokens, lengths, slots):
    config = both(FAMILY)[0].config
    layer, store, untouched = last_layer(config, torch.float32), full_store(config), full_store(config)
    with pytest.raises(ValueError):
        run(layer, some_rows(config, tokens), store, plan_of(*lengths, slots=slots))
    assert torch.equal(store.states.recurrent_state, untouched.states.recurrent_state)
