"""Lesson 11. The fast parts: the C++ step equals the torch step, and packed models give Hugging Face's tokens."""

import copy
import dataclasses
from functools import partial

import pytest
import torch

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.layout import kv_shape
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.hybrid.fast import hybrid_decoder, native_step_for
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.native import Gates, Half, NativeStep, StepSizes
from mini_engine.hybrid.store import HybridKv
from mini_engine.kv.block_tensor import KvPool
from mini_engine.layers import speed_up
from tests.l9.test_native_structs import PACKAGE, fields_in_cpp, kind_of
from tests.l11.models import SELECTED, both

NEW = 12
speed_up_hybrid = partial(speed_up, decoder=hybrid_decoder)
each_family = pytest.mark.parametrize("family", SELECTED)


@pytest.fixture(scope="module", autouse=True)
def needs_a_compiler():
    try:
        NativeStep(both("every fourth attends")[0].config, torch.float32)
    except UserError as why:
        pytest.skip(str(why))


def stores(config, dtype):
    """Return (torch's store, the C++ one) with the same random states."""
    torch.manual_seed(0)
    found = []
    for step in (None, NativeStep(config, dtype)):
        kv = KvPool(kv_shape(config), 2, 8, load_kernel("reference"), dtype)
        found.append(HybridKv(kv, GdnPool.for_model(config, 6, dtype=dtype), step))
    found[0].states.recurrent_state.normal_()
    found[0].states.conv_state.normal_()
    found[1].states.recurrent_state.copy_(found[0].states.recurrent_state)
    found[1].states.conv_state.copy_(found[0].states.conv_state)
    return found


@each_family
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("wider", [{}, {"linear_value_head_dim": 137}], ids=["", "wider than the registers"])
def test_the_cpp_step_equals_torch_s(family, wider, dtype, close):
    config = dataclasses.replace(both(family)[0].config, **wider)
    ours, fast = stores(config, dtype)
    slots = torch.tensor([4, 1, 6])
    wide = torch.randn(3, config.conv_dim + 5, dtype=dtype)  # a slice of a wider row, as a joined projection yields
    g, beta = -torch.rand(3, config.linear_num_value_heads), torch.rand(3, config.linear_num_value_heads)
    weight = torch.randn(config.conv_dim, config.linear_conv_kernel_dim, dtype=dtype)
    layer = config.num_gdn_layers - 1
    others = [0, 2, 3, 5]
    before = fast.states.recurrent_state[:, others].clone()
    for _ in range(3):
        want, got = (s._step(layer, weight, wide[:, : config.conv_dim], g, beta, slots, slots) for s in (ours, fast))
        assert torch.allclose(want.float(), got.float(), atol=close, rtol=close)
    assert torch.equal(ours.states.conv_state, fast.states.conv_state), "the last inputs are kept as they are"
    assert torch.allclose(ours.states.recurrent_state, fast.states.recurrent_state, atol=close, rtol=close)
    assert torch.equal(fast.states.recurrent_state[:, others], before), "no other slot may change"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_gets_the_same_bits_in_any_batch(dtype):
    """With values that are wider than the registers, and not a multiple of them."""
    config = dataclasses.replace(both("every fourth attends")[0].config, linear_value_head_dim=137)
    alone, batched = (stores(config, dtype)[1] for _ in range(2))
    slots = torch.tensor([4, 1, 6, 2, 5])
    qkv = torch.randn(5, config.conv_dim, dtype=dtype)
    g, beta = -torch.rand(5, config.linear_num_value_heads), torch.rand(5, config.linear_num_value_heads)
    weight = torch.randn(config.conv_dim, config.linear_conv_kernel_dim, dtype=dtype)
    together = batched._step(0, weight, qkv, g, beta, slots, slots)
    for i in range(5):
        one = slice(i, i + 1)
        out = alone._step(0, weight, qkv[one], g[one], beta[one], slots[one], slots[one])
        assert torch.equal(out[0], together[i]), "a neighbour in the batch changed a sequence's output"
    assert torch.equal(alone.states.recurrent_state, batched.states.recurrent_state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_packed_layer_gets_the_same_bits_in_any_batch(dtype):
    model = speed_up_hybrid(copy.deepcopy(both("every fourth attends")[0]).to(dtype), "packed")
    layer, step = model.model.layers[0], native_step_for(model)
    torch.manual_seed(0)
    x, slots = torch.randn(5, model.config.hidden_size, dtype=dtype), torch.tensor([4, 1, 6, 2, 5])
    alone, batched = (GdnPool.for_model(model.config, 6, dtype=dtype).get_layer_state(0) for _ in range(2))
    net = layer.mixer
    arguments = (net.struct, net.gates)
    together = x.clone()
    for _ in range(2):
        together = step.delta_net(together, *arguments, batched, net.conv_weight, slots)
        together = layer.feed_forward(together)
    for i in range(5):
        one = slice(i, i + 1)
        row = x[one].clone()
        for _ in range(2):
            row = step.delta_net(row, *arguments, alone, net.conv_weight, slots[one])
            row = layer.feed_forward(row)
        assert torch.equal(row[0], together[i]), "a neighbour in the batch changed a row"
    assert torch.equal(alone[0], batched[0]) and torch.equal(alone[1], batched[1])


def test_a_packed_layer_refuses_rows_and_slots_that_do_not_fit():
    model = speed_up_hybrid(copy.deepcopy(both("every fourth attends")[0]), "packed")
    net, step = model.model.layers[0].mixer, native_step_for(model)
    states = GdnPool.for_model(model.config, 6).get_layer_state(0)
    rest = (net.struct, net.gates, states, net.conv_weight)
    for x, slots in (
        (torch.ones(2, 48), [1, 7]),
        (torch.ones(2, 48), [1, -1]),
        (torch.ones(2, 48), [1]),
        (torch.ones(2, 47), [1, 2]),
    ):
        with pytest.raises(ValueError):
            step.delta_net(x, *rest, torch.tensor(slots))
    with pytest.raises(ValueError):
        model.model.layers[0].feed_forward(torch.ones(2, 48, dtype=torch.bfloat16))
    assert not states[0].any(), "a refused call must write nothing"


@pytest.mark.parametrize(
    "struct, source",
    [(StepSizes, "gdn_step.h"), (Gates, "gdn_step.h"), (Half, "hybrid_layers.cpp")],
    ids=["StepSizes", "Gates", "Half"],
)
def test_python_and_cpp_agree_on_every_field(struct, source):
    in_cpp = fields_in_cpp(struct.__name__, (PACKAGE / "hybrid" / source).read_text(encoding="utf-8"))
    assert [(name, kind_of(ctype)) for name, ctype in struct._fields_] == in_cpp


def test_a_foreign_slot_is_refused_before_anything_is_written():
    config = both("every fourth attends")[0].config
    _, fast = stores(config, torch.float32)
    heads = config.linear_num_value_heads
    before = fast.states.recurrent_state.clone()
    with pytest.raises(ValueError):
        weight = torch.randn(config.conv_dim, config.linear_conv_kernel_dim)
        qkv = torch.randn(2, config.conv_dim)
        fast._step(0, weight, qkv, torch.zeros(2, heads), torch.zeros(2, heads), *[torch.tensor([1, 7])] * 2)
    assert torch.equal(fast.states.recurrent_state, before)


def test_a_fast_model_is_not_packed_twice_and_an_unknown_backend_is_refused():
    model = speed_up_hybrid(copy.deepcopy(both("every fourth attends")[0]), "packed")
    assert speed_up_hybrid(model) is model and native_step_for(model) is not None
    with pytest.raises(UserError):
        speed_up_hybrid(model, "fastest")
    with pytest.raises(UserError):
        build_engine(both("every fourth attends")[0], backend="fastest")
