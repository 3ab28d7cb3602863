"""Lesson 11. bfloat16 rounds a delta net's inputs and outputs, and nothing in between.

A head may read next to nothing from its state. The norm behind it divides by that, and makes any rounding in front of
it hundreds of times as large. So convolution, gates, norm and state are computed in float32, as the C++ step does.
"""

import copy

import pytest
import torch

from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.hybrid.model import GatedDeltaNet, GatedRMSNorm, ZeroCentredRMSNorm
from mini_engine.hybrid.store import HybridKv
from tests.shared.hybrids import both, checkpoint, first_logits, plan_of, store_of
from tests.support import some_ids

FAMILY = "every fourth attends"
NARROW, WIDE = torch.bfloat16, torch.float32


def store(config: HybridConfig, dtype: torch.dtype) -> HybridKv:
    """Return a store whose states, random numbers that bfloat16 can hold, do not depend on the dtype."""
    found = store_of(config, 3, dtype)
    torch.manual_seed(1)
    for tensor in (found.states.recurrent_state, found.states.conv_state):
        tensor.copy_(torch.randn(tensor.shape).to(NARROW))
    return found


@pytest.mark.parametrize("lengths", [(1, 1, 1), (9,), (70, 1, 2)], ids=["decodes", "a prompt", "both"])
def test_a_scan_in_bfloat16_is_float32_s_rounded_once(lengths):
    config = HybridConfig.from_dir(checkpoint(FAMILY))
    narrow, wide = store(config, NARROW), store(config, WIDE)
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), config.conv_dim).to(NARROW)
    g, beta = -torch.rand(len(qkv), config.linear_num_value_heads), torch.rand(len(qkv), config.linear_num_value_heads)
    weight = torch.randn(config.conv_dim, config.linear_conv_kernel_dim).to(NARROW)
    got = narrow.scan(0, qkv, g, beta, weight, plan_of(*lengths))
    want = wide.scan(0, qkv.float(), g, beta, weight.float(), plan_of(*lengths))
    assert torch.equal(got, want.to(NARROW)), "the convolution is rounded before the delta rule reads it"
    assert torch.equal(narrow.states.recurrent_state, wide.states.recurrent_state), "the state was fed rounded numbers"


@pytest.mark.parametrize(("kind", "num_inputs"), [(GatedRMSNorm, 2), (ZeroCentredRMSNorm, 1)])
def test_a_norm_in_bfloat16_is_float32_s_rounded_once(kind, num_inputs):
    torch.manual_seed(0)
    wide, narrow = kind(8, 1e-6), kind(8, 1e-6).to(NARROW)
    narrow.weight.data.uniform_(0.5, 1.5)
    wide.weight.data.copy_(narrow.weight.data)
    inputs = [torch.randn(2, 4, 8).to(NARROW) for _ in range(num_inputs)]
    assert torch.equal(narrow(*inputs), wide(*(x.float() for x in inputs)).to(NARROW)), "compute in float32, cast once"


def test_how_much_is_written_is_not_rounded():
    """beta is near 1 where a head writes, and bfloat16 has steps of 1/256 there."""

    class Listens:
        def scan(self, layer, qkv, g, beta, conv_weight, meta):
            self.gates = g.dtype, beta.dtype
            return torch.zeros(len(qkv), heads, config.linear_value_head_dim, dtype=qkv.dtype)

    config, kv = both(FAMILY, NARROW)[0].config, Listens()
    heads = config.linear_num_value_heads
    net = GatedDeltaNet(config, 0).to(NARROW)
    nothing = torch.empty(0)
    net(torch.randn(3, config.hidden_size, dtype=NARROW), nothing, nothing, kv, None)
    assert kv.gates == (WIDE, WIDE), "g and beta are computed in float32"


@torch.inference_mode()
def test_logits_in_bfloat16_are_nearer_to_float32_s_than_transformers_are():
    """Its convolution, beta and gated norm round in between. The weights that all of them compute with are the same."""
    ours_off = theirs_off = 0.0
    exact = copy.deepcopy(both(FAMILY, NARROW)[1]).float()
    for seed in range(4):
        ids = some_ids(127, 160, seed=seed)
        ours, theirs = first_logits(FAMILY, ids, NARROW)
        want = exact(torch.tensor([ids])).logits[0]
        ours_off += (ours - want).abs().mean().item()
        theirs_off += (theirs - want).abs().mean().item()
    assert ours_off < 0.95 * theirs_off, f"mean error {ours_off / 4:.4f}, transformers' {theirs_off / 4:.4f}"
