"""Lesson 0. Causal attention of one sequence, compared with a plain loop in float64."""

import pytest
import torch

from mini_engine.attention.dense import causal_attention
from tests.support import oracle

pytestmark = pytest.mark.task(3)


def qkv(q_len, kv_len, heads, kv_heads, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(q_len, heads, dim, generator=generator)
    k = torch.randn(kv_len, kv_heads, dim, generator=generator)
    v = torch.randn(kv_len, kv_heads, dim, generator=generator)
    return q, k, v


def equal_the_oracle(out, want, why):
    assert out.shape == want.shape, "the result must have q's shape, [q_len, H_q, D]"
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5, msg=lambda m: f"{why}\n{m}")


def test_a_token_sees_itself():
    q, k, v = qkv(1, 1, 2, 2, 8)
    equal_the_oracle(causal_attention(q, k, v), v.double(), "one token, none before it: it sees itself, so out is v")


def test_no_query_sees_a_later_token():
    q, k, v = qkv(6, 6, 2, 2, 8)
    before = causal_attention(q.clone(), k, v)
    k[4:], v[4:] = 3.0, -100.0
    after = causal_attention(q, k, v)
    assert torch.equal(after[:4], before[:4]), "queries 0-3 changed when tokens 4-5 did: a query saw a later token"
    assert not torch.equal(before[4:], after[4:]), "queries 4-5 do not see their own tokens"


def test_scores_are_scaled():
    q, k, v = qkv(5, 5, 1, 1, 16)
    want = oracle(q, k, v)
    equal_the_oracle(causal_attention(q, k, v), want, "scale is None: q·k is scaled by D ** -0.5")


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (8, 2), (8, 1)])
def test_query_head_h_reads_key_head_h_over_group(heads, kv_heads):
    q, k, v = qkv(5, 5, heads, kv_heads, 16)
    why = f"{heads} query heads, {kv_heads} key/value heads: head h must read key/value head h // {heads // kv_heads}"
    want = oracle(q, k, v)
    equal_the_oracle(causal_attention(q, k, v), want, why)


@pytest.mark.parametrize("q_len, kv_len", [(1, 9), (3, 9), (8, 9), (9, 9)])
def test_the_queries_are_the_last_tokens_of_the_sequence(q_len, kv_len):
    q, k, v = qkv(q_len, kv_len, 4, 2, 16)
    sees = f"q_len = {q_len}, kv_len = {kv_len}: query i sees keys 0 … {kv_len - q_len} + i"
    why = f"{sees}; the mask is bottom-right, not top-left"
    want = oracle(q, k, v)
    equal_the_oracle(causal_attention(q, k, v), want, why)


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0])
def test_a_scale_that_is_given_replaces_the_default(scale):
    q, k, v = qkv(3, 5, 4, 2, 16)
    want = oracle(q * (scale / 16**-0.5), k, v)
    why = f"scale={scale} was given: it takes the place of D ** -0.5, which is for None only"
    equal_the_oracle(causal_attention(q, k, v, scale), want, why)


def test_large_scores_do_not_overflow():
    q, k, v = qkv(4, 4, 2, 1, 16)
    out = causal_attention(q * 100, k, v)
    assert out.isfinite().all(), "with scores in the hundreds, exp() overflows; torch.softmax does not"
    equal_the_oracle(out, oracle(q * 100, k, v), "scores in the hundreds")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_has_the_dtype_of_q(dtype):
    q, k, v = (x.to(dtype) for x in qkv(3, 3, 4, 2, 16))
    got = causal_attention(q, k, v).dtype
    assert got == dtype, f"the next layer multiplies it by {dtype} weights"


def test_it_does_not_modify_its_arguments():
    q, k, v = qkv(3, 5, 4, 2, 16)
    copies = q.clone(), k.clone(), v.clone()
    causal_attention(q, k, v)
    for name, mine, kept in zip("qkv", (q, k, v), copies, strict=True):
        assert torch.equal(mine, kept), f"{name} belongs to the caller, and changed: was an in-place operation used?"


def test_its_tensors_are_on_the_device_of_q():
    q, k, v = (x.to("meta") for x in qkv(3, 5, 4, 2, 16))
    try:
        out = causal_attention(q, k, v)
    except RuntimeError as error:
        error.add_note("q, k and v are not on the CPU here: make the mask on q.device")
        raise
    assert out.device == q.device, f"the result is on {out.device}, q on {q.device}"
