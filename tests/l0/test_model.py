"""Lesson 0. The model: the values of every layer and the logits of every position equal Hugging Face's."""

import pytest
import torch

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.kv.no_cache import NoCache, NoCacheMeta
from mini_engine.model.layers import RMSNorm
from mini_engine.model.rope import RotaryEmbedding, apply_rope
from tests.support import FAMILIES, both, some_ids


def run(model, ids, rows=None):
    with torch.inference_mode():
        return model(torch.tensor(ids), NoCache(), NoCacheMeta(torch.arange(len(ids))), rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 63])
def test_logits_agree_at_every_position(family, length):
    ours, hf = both(family)
    ids = some_ids(length, ours.config.vocab_size)
    with torch.inference_mode():
        want = hf(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run(ours, ids), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_agree_layer_by_layer(family):
    ours, hf = both(family)
    ids = some_ids(33, ours.config.vocab_size)
    got = []
    hooks = [layer.register_forward_hook(lambda m, a, out: got.append(out)) for layer in ours.model.layers]
    run(ours, ids)
    for hook in hooks:
        hook.remove()
    with torch.inference_mode():
        want = hf(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for index, (mine, theirs) in enumerate(zip(got[:-1], want[1:], strict=False)):  # HF's last one is normed
        torch.testing.assert_close(
            mine, theirs[0], atol=1e-4, rtol=1e-4, msg=lambda m, i=index: f"layer {i} is the first to differ: {m}"
        )
    assert len(want) == len(got) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_casts_where_hugging_face_casts(dtype):
    from transformers.models.qwen3 import modeling_qwen3 as hf_qwen3

    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    weight = torch.rand(48, generator=torch.Generator().manual_seed(1)).add(0.5).to(dtype)
    ours, theirs = RMSNorm(48, 1e-6).to(dtype), hf_qwen3.Qwen3RMSNorm(48, 1e-6).to(dtype)
    ours.weight.data, theirs.weight.data = weight, weight.clone()
    assert torch.equal(ours(x), theirs(x)), (
        "the norm must equal Hugging Face's bit for bit: compute in float32, cast back, and only then multiply"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_equals_hugging_face_bit_for_bit(dtype):
    from transformers.models.qwen3 import modeling_qwen3 as hf_qwen3

    positions = torch.tensor([0, 1, 2, 63, 1000, 40_000])
    q = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    config = hf_qwen3.Qwen3Config(head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    cos, sin = hf_qwen3.Qwen3RotaryEmbedding(config)(q, positions[None])
    want, _ = hf_qwen3.apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
    ours = RotaryEmbedding(Qwen3Config(1, 1, 1, 1, 1, 1, head_dim=32, rope_theta=10_000.0))
    got = apply_rope(q, *ours(positions, dtype))
    assert torch.equal(got, want[0].transpose(0, 1)), "rotate-half RoPE pairs element i with element i + D/2"
