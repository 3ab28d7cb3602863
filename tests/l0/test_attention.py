"""Lesson 0. Causal attention of one sequence, compared with a plain loop in float64."""

import pytest
import torch

from mini_engine.attention.dense import causal_attention
from tests.support import oracle


def qkv(q_len, kv_len, heads, kv_heads, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(q_len, heads, dim, generator=generator)
    k = torch.randn(kv_len, kv_heads, dim, generator=generator)
    v = torch.randn(kv_len, kv_heads, dim, generator=generator)
    return q, k, v


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (4, 2), (8, 2), (8, 1)])
def test_query_head_h_reads_key_head_h_over_group(heads, kv_heads):
    q, k, v = qkv(5, 5, heads, kv_heads, 16)
    out = causal_attention(q, k, v)
    assert out.shape == (5, heads, 16), f"the result is {tuple(out.shape)}; it must have q's shape, [q_len, H_q, D]"
    torch.testing.assert_close(
        out.double(),
        oracle(q, k, v),
        atol=1e-5,
        rtol=1e-5,
        msg=lambda m: f"head h must read key/value head h // {heads // kv_heads}. {m}",
    )


def test_no_query_sees_a_later_token():
    q, k, v = qkv(6, 6, 2, 2, 8)
    before = causal_attention(q, k, v)
    k[4:], v[4:] = 100.0, -100.0
    after = causal_attention(q, k, v)
    assert torch.equal(before[:4], after[:4]), "queries 0-3 changed when tokens 4-5 did: the causal mask is missing"
    assert not torch.equal(before[4:], after[4:]), "queries 4-5 do not see their own tokens"


@pytest.mark.parametrize("q_len, kv_len", [(1, 9), (3, 9), (8, 9), (9, 9)])
def test_the_queries_are_the_last_tokens_of_the_sequence(q_len, kv_len):
    q, k, v = qkv(q_len, kv_len, 4, 2, 16)
    torch.testing.assert_close(
        causal_attention(q, k, v).double(),
        oracle(q, k, v),
        atol=1e-5,
        rtol=1e-5,
        msg=lambda m: f"query i sees keys 0 … {kv_len - q_len} + i: the mask is bottom-right, not top-left. {m}",
    )
