"""Lesson 11. The C++ step equals the torch step, whatever is beside a sequence, and refuses what does not fit."""

import copy
import dataclasses
from functools import partial

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.hybrid.fast import hybrid_decoder, native_step_for
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.native import NativeStep
from mini_engine.layers import speed_up
from tests.shared.hybrids import SELECTED, both, store_of

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
    """A model with packed layers, and its C++ step."""
    model = speed_up_hybrid(copy.deepcopy(both(FAMILY)[0]), "packed")
    return model, native_step_for(model)


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


@pytest.mark.parametrize("family", SELECTED)
@each_dtype
@pytest.mark.parametrize("wider", [{}, {"linear_value_head_dim": 137}], ids=["", "wider than the registers"])
def test_the_cpp_step_equals_torch_s(family, wider, dtype, close):
    config = dataclasses.replace(both(family)[0].config, **wider)
    ours, fast = stores(config, dtype)
    slots, others = torch.tensor([4, 1, 6]), [0, 2, 3, 5]
    *rows, weight = inputs(config, 3, dtype)
    layer = config.num_gdn_layers - 1
    before = fast.states.recurrent_state[:, others].clone()
    for _ in range(3):
        want, got = (s._step(layer, weight, *rows, slots, slots) for s in (ours, fast))
        assert torch.allclose(want.float(), got.float(), atol=close, rtol=close)
    assert torch.equal(ours.states.conv_state, fast.states.conv_state), "the last inputs are kept as they are"
    assert torch.allclose(ours.states.recurrent_state, fast.states.recurrent_state, atol=close, rtol=close)
    assert torch.equal(fast.states.recurrent_state[:, others], before), "no other slot may change"


@each_dtype
def test_a_sequence_gets_the_same_bits_in_any_batch(dtype, close):
    """With values that are wider than the registers, and not a multiple of them."""
    config = dataclasses.replace(both(FAMILY)[0].config, linear_value_head_dim=137)
    (_, alone), (_, batched) = (stores(config, dtype) for _ in range(2))
    slots = torch.tensor([4, 1, 6, 2, 5])
    *rows, weight = inputs(config, 5, dtype)
    together = batched._step(0, weight, *rows, slots, slots)
    for i in range(5):
        out = alone._step(0, weight, *(x[i : i + 1] for x in (*rows, slots, slots)))
        assert torch.equal(out[0], together[i]), "a neighbour in the batch changed a sequence's output"
    assert torch.equal(alone.states.recurrent_state, batched.states.recurrent_state)


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
    model, step = packed
    net, states = model.model.layers[0].mixer, GdnPool.for_model(model.config, 6).get_layer_state(0)
    with pytest.raises(ValueError):
        step.delta_net(x, net.struct, net.gates, states, net.conv_weight, torch.tensor(slots))
    with pytest.raises(ValueError):
        model.model.layers[0].feed_forward(torch.ones(2, 48, dtype=torch.bfloat16))
    assert not states[0].any(), "a refused call must write nothing"


def test_a_foreign_slot_is_refused_before_anything_is_written():
    config = both(FAMILY)[0].config
    _, fast = stores(config, torch.float32)
    before, slots = fast.states.recurrent_state.clone(), torch.tensor([1, 7])
    *rows, weight = inputs(config, 2, torch.float32)
    with pytest.raises(ValueError):
        fast._step(0, weight, *rows, slots, slots)
    assert torch.equal(fast.states.recurrent_state, before)
