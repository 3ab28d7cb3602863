"""Lesson 11. Guessed tokens: a state behind each of them, equal to feeding them one at a time.

Lesson 14 guesses; here the tokens are given, and it is the store and the plan that are checked.
"""

import itertools

import pytest
import torch

from mini_engine.assembly.layout import kv_shape
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.native import NativeStep
from mini_engine.hybrid.plan import with_states
from mini_engine.hybrid.store import HybridKv
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from tests.l11.models import SELECTED, both

each_family = pytest.mark.parametrize("family", SELECTED)
# slots of each sequence of a step, and the tokens that it feeds: alone, beside others that guess, beside a prompt
STEPS = {
    "one guess": ([[1, 2]], [2]),
    "several": ([[3, 1, 5, 4]], [4]),
    "of different lengths": ([[1, 6, 7], [2], [3, 4, 5, 8]], [3, 1, 4]),
    "beside a prompt": ([[1, 6], [2], [3, 4, 5]], [2, 9, 3]),
}


def native_step(config, kind):
    if kind == "torch":
        return None
    try:
        return NativeStep(config, torch.float32)
    except UserError as why:
        pytest.skip(str(why))


def store_of(config, kind):
    """Return a store whose states are random, the same each time."""
    kv = KvPool(kv_shape(config), 2, 8, load_kernel("reference"), torch.float32)
    store = HybridKv(kv, GdnPool.for_model(config, 8), native_step(config, kind))
    torch.manual_seed(0)
    for states in (store.states.recurrent_state, store.states.conv_state):
        states.normal_()
    return store


def plan(slots, lengths):
    """Return a step's plan; attention's part of it is not read here."""
    rows = torch.arange(sum(lengths))
    none = torch.zeros(0, dtype=torch.int32)
    return with_states(ForwardMeta(rows, rows, none, none, none, 8), slots, lengths)


def tokens_of(config, count):
    torch.manual_seed(1)
    weight = torch.randn(config.conv_dim, config.linear_conv_kernel_dim)
    g, beta = -torch.rand(count, config.linear_num_value_heads), torch.rand(count, config.linear_num_value_heads)
    return torch.randn(count, config.conv_dim), g, beta, weight


def one_at_a_time(store, layer, inputs, slots, lengths):
    """Feed every guess in a step of its own, to a copy of the state before it."""
    qkv, g, beta, weight = inputs
    out, start = [], 0
    for own, length in zip(slots, lengths, strict=True):
        if length != len(own):  # a prompt: all of its tokens go to one state
            part = slice(start, start + length)
            out.append(store.scan(layer, qkv[part], g[part], beta[part], weight, plan([own], [length])))
        for index, slot in enumerate(own if length == len(own) else ()):
            if index:
                store.states.copy_states(own[index - 1], slot)
            row = slice(start + index, start + index + 1)
            out.append(store.scan(layer, qkv[row], g[row], beta[row], weight, plan([[slot]], [1])))
        start += length
    return torch.cat(out)


@each_family
@pytest.mark.parametrize("kind", ["torch", "C++"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_with_guesses_equals_one_token_at_a_time(family, kind, name):
    config = both(family)[0].config
    slots, lengths = STEPS[name]
    inputs, layer = tokens_of(config, sum(lengths)), config.num_gdn_layers - 1
    expected = store_of(config, kind)
    want = one_at_a_time(expected, layer, inputs, slots, lengths)
    store = store_of(config, kind)
    got = store.scan(layer, *inputs, plan(slots, lengths))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg="a guess saw another state than the one before it")
    for slot in itertools.chain.from_iterable(slots):
        for states, others in zip(
            store.states.get_layer_state(layer), expected.states.get_layer_state(layer), strict=True
        ):
            torch.testing.assert_close(
                states[slot], others[slot], rtol=1e-5, atol=1e-5, msg=f"slot {slot}: the state behind another token"
            )


@each_family
def test_a_wrong_guess_leaves_the_state_before_it_as_it_was(family):
    config = both(family)[0].config
    store, others = store_of(config, "torch"), store_of(config, "torch")
    qkv, g, beta, weight = tokens_of(config, 3)
    store.scan(0, qkv, g, beta, weight, plan([[1, 2, 3]], [3]))
    others.scan(0, qkv[:1], g[:1], beta[:1], weight, plan([[1]], [1]))
    assert torch.allclose(store.states.recurrent_state[0, 1], others.states.recurrent_state[0, 1], atol=1e-5), (
        "slot 1 has seen the newest token, and none of the guesses behind it"
    )
