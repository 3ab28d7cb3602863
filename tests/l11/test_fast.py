"""Lesson 11. The C++ step equals the torch step, whatever is beside a sequence, and refuses what does not fit."""

import copy
import dataclasses
from functools import partial

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.hybrid.fast import hybrid_decoder
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.native import Feed, Feeds, NativeStep
from mini_engine.hybrid.packed_mixers import StateStep
from mini_engine.hybrid.store import feeds_of
from mini_engine.layers import speed_up
from tests.shared.hybrids import SELECTED, both, plan_of, store_of

speed_up_hybrid = partial(speed_up, decoder=hybrid_decoder)
FAMILY = "every fourth attends"
each_dtype = pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])


@pytest.fixture(scope="module", autouse=True)
def needs_a_compiler():
    try:
        NativeStep(both(FAMILY)[0].config, torch.float32)
    except UserError as why:
        pytest.skip(str(why))


@pytest.fixture
def packed():
    """A model with packed layers."""
    return speed_up_hybrid(copy.deepcopy(both(FAMILY)[0]), "packed")


def stores(config, dtype):
    """Return (torch's store, the C++ one) with the same random states."""
    torch.manual_seed(0)
    ours, fast = (store_of(config, 6, dtype, step) for step in (None, NativeStep(config, dtype)))
    for name in ("recurrent_state", "conv_state"):
        getattr(fast.states, name).copy_(getattr(ours.states, name).normal_())
    return ours, fast


def inputs(config, count, dtype):
    """Return random qkv, g and beta of `count` tokens, and the convolution's weight."""
    wide = torch.randn(count, config.conv_dim + 5, dtype=dtype)  # a slice of a wider row, as a joined projection yields
    g, beta = -torch.rand(count, config.linear_num_value_heads), torch.rand(count, config.linear_num_value_heads)
    return wide[:, : config.conv_dim], g, beta, torch.randn(config.conv_dim, config.linear_conv_kernel_dim, dtype=dtype)


WIDER = {"linear_value_head_dim": 137}  # than the registers, and no multiple of them
PLANS = {
    "a token each": plan_of(1, 1, 1, slots=[[4], [1], [6]]),
    "prompts of one part and of several": plan_of(9, 150, 1, slots=[[4], [1], [6]]),
    "drafts beside a prompt": plan_of(3, 65, 2, slots=[[4, 2, 6], [1], [3, 5]]),
}


@pytest.mark.parametrize("family", SELECTED)
@each_dtype
@pytest.mark.parametrize("wider", [{}, WIDER], ids=["", "wider than the registers"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_scan_in_cpp_equals_torch_s(family, wider, plan, dtype, close):
    config = dataclasses.replace(both(family)[0].config, **wider)
    ours, fast = stores(config, dtype)
    *rows, weight = inputs(config, len(plan.positions), dtype)
    layer = config.num_gdn_layers - 1
    touched = {s for feed in feeds_of(plan) for s in feed.slots.tolist()}
    others = [s for s in range(ours.states.num_slots) if s not in touched]
    before = fast.states.recurrent_state[:, others].clone()
    for _ in range(2):
        want, got = (s.scan(layer, *rows, weight, plan) for s in (ours, fast))
        assert torch.allclose(want.float(), got.float(), atol=close, rtol=close)
    assert torch.equal(ours.states.conv_state, fast.states.conv_state), "the last inputs are kept as they are"
    assert torch.allclose(ours.states.recurrent_state, fast.states.recurrent_state, atol=close, rtol=close)
    assert torch.equal(fast.states.recurrent_state[:, others], before), "no other slot may change"


@each_dtype
@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 150])
def test_a_sequence_gets_the_same_bits_in_any_chunks_and_beside_others(dtype, close, chunk):
    config = dataclasses.replace(both(FAMILY)[0].config, **WIDER)
    (_, alone), (_, batched) = (stores(config, dtype) for _ in range(2))
    *rows, weight = inputs(config, 200, dtype)  # 150 tokens of ours, with neighbours around them
    together = batched.scan(0, *rows, weight, plan_of(33, 150, 17, slots=[[2], [4], [1]]))[33:183]
    mine = [x[33:183] for x in rows]
    parts = [
        alone.scan(0, *(x[at : at + chunk] for x in mine), weight, plan_of(len(mine[1][at : at + chunk]), slots=[[4]]))
        for at in range(0, 150, chunk)
    ]
    assert torch.equal(torch.cat(parts), together), "where a chunk ends, or a neighbour, changed a sequence's output"
    for name in ("recurrent_state", "conv_state"):
        assert torch.equal(getattr(alone.states, name)[0, 4], getattr(batched.states, name)[0, 4]), name


def test_the_state_behind_a_prompt_can_go_to_another_slot():
    config = both(FAMILY)[0].config
    (_, moved), (_, kept) = (stores(config, torch.float32) for _ in range(2))
    *rows, weight = inputs(config, 150, torch.float32)
    before = moved.states.recurrent_state[0, 4].clone()
    to, one = [torch.tensor([slot]) for slot in (4, 5)], dict(rows=torch.tensor([0]), counts=torch.tensor([150]))
    feeds = Feeds([Feed(*to, **one)], 150, moved.states.num_slots)
    out = moved.native_step(moved.states.get_layer_state(0), *rows, weight, feeds)
    assert torch.equal(out, kept.scan(0, *rows, weight, plan_of(150, slots=[[4]])))
    assert torch.equal(moved.states.recurrent_state[0, 5], kept.states.recurrent_state[0, 4])
    assert torch.equal(moved.states.recurrent_state[0, 4], before), "the source is only read"


@pytest.mark.parametrize(
    ("x", "slots"),
    [
        (torch.ones(2, 48), [1, 7]),
        (torch.ones(2, 48), [1, -1]),
        (torch.ones(2, 48), [1]),
        (torch.ones(2, 47), [1, 2]),
    ],
    ids=["a slot too high", "a slot below 0", "a slot too few", "narrow rows"],
)
def test_a_packed_layer_refuses_what_does_not_fit_before_anything_is_written(packed, x, slots):
    layer, pool = packed.model.layers[0], GdnPool.for_model(packed.config, 6)
    with pytest.raises(ValueError):
        feeds = Feeds([Feed(torch.tensor(slots), torch.tensor(slots))], 2, pool.num_slots)
        layer.mixer.packed.run(x, StateStep(pool, feeds))
    assert not pool.recurrent_state.any(), "a refused call must write nothing"


@pytest.mark.parametrize(("lengths", "slots"), [((1, 1), [[1], [7]]), ((9, 1), [[7], [1]]), ((3, 1), [[1], [2]])])
def test_a_foreign_slot_or_row_is_refused_before_anything_is_written(lengths, slots):
    config = both(FAMILY)[0].config
    _, fast = stores(config, torch.float32)
    before, plan = fast.states.recurrent_state.clone(), plan_of(*lengths, slots=slots)
    *rows, weight = inputs(config, 2, torch.float32)
    with pytest.raises(ValueError):
        fast.scan(0, *rows, weight, plan)
    assert torch.equal(fast.states.recurrent_state, before)
