"""Lesson 16. The two ways to read latents: what each computes, that they agree, and what each costs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mini_engine.base.errors import UserError
from mini_engine.latents import expand as expand_fast
from mini_engine.latents import reading
from mini_engine.latents.latent_config import LatentConfig
from mini_engine.latents.reading import (
    absorbed_attention,
    expand,
    expanded_attention,
    expanding_pays,
    multiplications,
)
from tests.shared.small_latents import (
    HEADS,
    NOPE,
    RANK,
    ROPE,
    V,
    attention,
    close,
    config_of,
    keys_and_values,
    over_latents,
    pool_of,
    randoms,
)

CONFIG = config_of()
TOKENS = 7


def latents(dtype=torch.float32):
    """Return latents, rotary keys and kv_b."""
    return randoms((TOKENS, RANK), (TOKENS, ROPE), (HEADS, NOPE + V, RANK), dtype=dtype)


# Task 2: keys and values of all heads


@pytest.mark.task(2)
def test_expand_makes_a_key_and_a_value_for_each_token_and_head():
    k, v = expand(*latents(), CONFIG)
    assert list(k.shape) == [TOKENS, HEADS, NOPE + ROPE], "keys are [n, H, nope + rope]"
    assert list(v.shape) == [TOKENS, HEADS, V], "values are [n, H, v]"


@pytest.mark.task(2)
def test_each_head_multiplies_the_latent_by_its_own_matrix():
    c, r, kv_b = latents()
    k, v = expand(c, r, kv_b, CONFIG)
    want_k, want_v = keys_and_values(c, r, kv_b)
    mixed = kv_b.reshape(NOPE + V, HEADS, RANK).transpose(0, 1)
    guesses = {
        "it was split at v: the first nope rows of kv_b[h] are W_UK, the v rows below them W_UV": torch.einsum(
            "nr,hdr->nhd", c, kv_b[:, V:]
        ),
        "the rows of kv_b were dealt to the heads in turn: it is [H, nope + v, rank] already": torch.einsum(
            "nr,hdr->nhd", c, mixed[:, :NOPE]
        ),
    }
    if torch.allclose(k[..., ROPE:], want_k[..., :NOPE], atol=1e-5):
        guesses["the rotary key comes first: it is the end of a key, as of a query"] = k[..., :NOPE]
    close(k[..., :NOPE], want_k[..., :NOPE], f"the first {NOPE} numbers of head h's key are W_UK[h] c", guesses)
    guesses = {"it is made by the first rows of kv_b[h], which are W_UK": torch.einsum("nr,hdr->nhd", c, kv_b[:, :V])}
    close(v, want_v, f"head h's value is W_UV[h] c: the last {V} rows of kv_b[h]", guesses)


@pytest.mark.task(2)
def test_all_heads_have_the_same_rotary_key():
    c, r, kv_b = latents()
    k, _ = expand(c, r, kv_b, CONFIG)
    teach = f"the last {ROPE} numbers of each head's key are the token's rotary key, as it was stored"
    close(k[..., NOPE:], torch.stack([r] * HEADS, dim=1), teach)


@pytest.mark.task(2)
def test_expanding_gives_what_hugging_faces_expand_kv_gives():
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim")
    sizes = {name: getattr(CONFIG, name) for name in (*names, "qk_rope_head_dim", "v_head_dim", "q_lora_rank")}
    theirs = DeepseekV3Attention(DeepseekV3Config(**sizes), 0).requires_grad_(False)
    c, r, kv_b = latents()
    theirs.kv_b_proj.weight.copy_(kv_b.flatten(0, 1))
    k, v = expand(c, r, kv_b, CONFIG)
    want_k, want_v = theirs.expand_kv(c[None, None], r[None, None])
    close(k, want_k[0].transpose(0, 1), "keys are those of transformers")
    close(v, want_v[0].transpose(0, 1), "values are those of transformers")


@pytest.mark.task(2)
def test_expand_keeps_the_dtype_and_its_inputs():
    inputs = latents(torch.float64)
    before = [x.clone() for x in inputs]
    k, v = expand(*inputs, CONFIG)
    assert k.dtype == torch.float64, "keys are of the latents' dtype"
    assert v.dtype == torch.float64, "values are of the latents' dtype"
    changed = [name for name, x, y in zip(["c", "r", "kv_b"], inputs, before, strict=True) if not torch.equal(x, y)]
    assert changed == [], "the latents stay as they are: others read them"


# Task 3: latents as they are


class Noting:
    """A kernel that notes each call's queries, and returns the same sums for all of them."""

    def __init__(self, sums=None):
        self.sums, self.asked = torch.zeros(3, HEADS, RANK) if sums is None else sums, []

    def __call__(self, q, q_rope):
        self.asked.append((q, q_rope))
        return self.sums[:, : q.shape[1]]


def kernel_over(c, r):
    """Return a kernel over one sequence's latents."""
    return lambda q, q_rope: over_latents(q, q_rope, c, r, CONFIG.attention_scale)


def queries(count=3, dtype=torch.float32):
    return randoms((count, HEADS, NOPE + ROPE), seed=4, dtype=dtype)[0]


@pytest.mark.task(3)
def test_the_kernel_is_asked_once_with_queries_as_wide_as_a_latent():
    attend = Noting()
    absorbed_attention(queries(), latents()[2], CONFIG, attend)
    assert len(attend.asked) == 1, "one call of attend for all heads: it reads each latent once for all of them"
    q, q_rope = attend.asked[0]
    assert list(q.shape) == [3, HEADS, RANK], "a query that has absorbed W_UK meets latents: it is as wide as they are"
    assert list(q_rope.shape) == [3, HEADS, ROPE], "the part with RoPE goes along as it is: it meets rotary keys"


@pytest.mark.task(3)
def test_queries_absorb_w_uk():
    attend, q, kv_b = Noting(), queries(), latents()[2]
    absorbed_attention(q, kv_b, CONFIG, attend)
    got, got_rope = attend.asked[0]
    want = torch.stack([q[:, h, :NOPE] @ kv_b[h, :NOPE] for h in range(HEADS)], dim=1)
    guesses = {
        "the scale is in it: attend multiplies scores by it": want * CONFIG.attention_scale,
        "all heads have the first head's W_UK": q[..., :NOPE] @ kv_b[0, :NOPE],
        "the last rows of kv_b[h] were taken, but W_UK is the first": torch.stack(
            [q[:, h, :NOPE] @ kv_b[h, V:] for h in range(HEADS)], dim=1
        ),
    }
    close(got, want, "q · (W_UK c) = (W_UKᵀ q) · c: head h's query without RoPE, times W_UK[h]", guesses)
    guesses = {"it is zero: the rotary scores are lost": torch.zeros_like(got_rope)}
    close(got_rope, q[..., NOPE:], f"the last {ROPE} numbers of each query are its part with RoPE", guesses)


@pytest.mark.task(3)
def test_sums_of_latents_are_multiplied_by_w_uv():
    kv_b, [sums] = latents()[2], randoms((3, HEADS, RANK), seed=8)
    out = absorbed_attention(queries(), kv_b, CONFIG, Noting(sums))
    want = torch.stack([sums[:, h] @ kv_b[h, NOPE:].T for h in range(HEADS)], dim=1)
    guesses = {"all heads have the first head's W_UV": sums @ kv_b[0, NOPE:].T, "they are still sums of latents": sums}
    close(out, want, f"Σ p (W_UV c) = W_UV (Σ p c): head h's sum times W_UV[h], [3, {HEADS}, {V}]", guesses)


@pytest.mark.task(3)
@pytest.mark.parametrize("dtype, within", [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"])
def test_absorbed_is_what_keys_and_values_of_all_heads_give(dtype, within):
    c, r, kv_b = latents(dtype)
    for count in (1, 3, TOKENS):
        q = queries(count, dtype)
        out = absorbed_attention(q, kv_b, CONFIG, kernel_over(c, r))
        assert out.dtype == dtype, "computed in q's dtype"
        want = attention(q, c, r, kv_b, CONFIG.attention_scale)
        close(out, want, f"{count} queries over {TOKENS} latents, as if they had been expanded", within=within)


# Task 5: what each way costs


@pytest.mark.task(4)
def test_one_query_over_one_token_by_hand():
    config = LatentConfig(**vars(CONFIG) | dict(num_attention_heads=1, num_key_value_heads=1))
    expanded, absorbed = multiplications(config, 1, 1)
    made, met = RANK * (NOPE + V), NOPE + ROPE + V
    assert expanded == made + met, (
        f"kv_b times the latent, {RANK} · ({NOPE} + {V}) = {made}; then the score, {NOPE} + {ROPE}, and the value, {V}"
    )
    assert absorbed == made + 2 * RANK + ROPE, (
        f"W_UK times the query and W_UV times the sum, {made} together; then the score, {RANK} + {ROPE}, and the "
        f"latent times its weight, {RANK}"
    )


def counted(way, q_len, kv_len):
    """Return how many numbers torch multiplies in one of the ways (no softmax, no mask)."""
    sizes = (q_len, NOPE), (q_len, ROPE), (RANK, kv_len), (ROPE, kv_len), (NOPE, RANK), (V, RANK)
    q, q_rope, c, r, w_uk, w_uv = (torch.ones(HEADS, *size) for size in sizes)  # latents are columns
    with FlopCounterMode(display=False) as counter:
        if way == "expanded":
            keys, values = torch.cat((w_uk @ c, r), dim=1), w_uv @ c
            torch.cat((q, q_rope), dim=2) @ keys @ values.mT
        else:
            queries, keys = torch.cat((q @ w_uk, q_rope), dim=2), torch.cat((c, r), dim=1)
            queries @ keys @ c.mT @ w_uv.mT
    return counter.get_total_flops() // 2  # it counts additions, too


@pytest.mark.task(4)
@pytest.mark.parametrize("q_len, kv_len", [(1, 5), (4, 4), (2, 6), (3, 1), (0, 4)])
def test_the_counts_are_torchs(q_len, kv_len):
    expanded, absorbed = multiplications(CONFIG, q_len, kv_len)
    want_expanded, want_absorbed = (counted(way, q_len, kv_len) for way in ("expanded", "absorbed"))
    several = f"q_len {q_len}, kv_len {kv_len}, {HEADS} heads"
    assert expanded == want_expanded, f"{several}, expanded: kv_b meets every latent once for each head"
    assert absorbed == want_absorbed, f"{several}, absorbed: kv_b meets every query and every sum, and no latent"


DEEPSEEK_V3 = dict(num_attention_heads=128, num_key_value_heads=128, kv_lora_rank=512)
DEEPSEEK_V3 |= dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


@pytest.mark.task(4)
def test_deepseek_v3_expands_prompts_and_never_decodes():
    config = config_of(**DEEPSEEK_V3)
    for kv_len in (2, 100, 4096, 10**6):
        assert not expanding_pays(config, 1, kv_len), f"a decode over {kv_len} tokens would expand all of them for one"
    for length in (2, 100, 4096, 100_000):
        assert expanding_pays(config, length, length), (
            f"a prompt of {length} tokens: each latent is expanded once, and each query met in 320 numbers, not 1,088"
        )


@pytest.mark.task(4)
def test_where_the_ways_cross_depends_on_the_history():
    config = config_of(**DEEPSEEK_V3)
    for kv_len, first in ((1024, 147), (4096, 164), (10**6, 171)):
        pays = [q_len for q_len in range(1, 200) if expanding_pays(config, q_len, kv_len)]
        assert pays[0] == first, f"the fewest queries over {kv_len} tokens for which expanding takes less work"


# Both together


@pytest.mark.parametrize("piece", [4, 8, 12, 2048])
@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (5, 5), (11, 11), (3, 10), (6, 22), (22, 22)])
def test_expanded_attention_by_pieces(piece, q_len, kv_len, monkeypatch):
    monkeypatch.setattr(reading, "PIECE", piece)
    pool, [q], kv_b = pool_of([(q_len, kv_len)]), randoms((q_len, HEADS, NOPE + ROPE), seed=4), latents()[2]
    out = expanded_attention(q, (pool.c_cache, pool.r_cache), pool.table[0], kv_len, kv_b, CONFIG)
    want = attention(q, *pool.histories[0], kv_b, CONFIG.attention_scale)
    behind = f"{q_len} queries over {kv_len} latents, expanded {piece} at a time"
    close(out, want, f"{behind}: every piece has its own keys, at their own positions")


@pytest.mark.parametrize("most", [1, 2**26], ids=["a head at a time", "all heads"])
@pytest.mark.parametrize("sizes", [{}, dict(v_head_dim=17), dict(v_head_dim=NOPE + ROPE)], ids=str)
@pytest.mark.parametrize("dtype, within", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (11, 11), (6, 22), (40, 600)])
def test_expanding_with_the_cpp_kernel_is_the_same(q_len, kv_len, dtype, within, sizes, most, monkeypatch):
    monkeypatch.setattr(expand_fast, "MOST_BYTES", most)
    config, pool = config_of(**sizes), pool_of([(q_len, kv_len)])
    q, kv_b = randoms((q_len, HEADS, NOPE + ROPE), (HEADS, NOPE + config.v_head_dim, RANK), seed=4, dtype=dtype)
    q /= 4  # a key's rounding moves its score as much as the query is long
    caches = pool.c_cache.to(dtype), pool.r_cache.to(dtype)
    try:
        out = expand_fast.expanded_attention(q, caches, pool.table[0], kv_len, kv_b, config)
    except UserError as why:
        pytest.skip(str(why))
    want = attention(q, *(x.to(dtype) for x in pool.histories[0]), kv_b, config.attention_scale)
    assert out.dtype == dtype
    close(out, want, f"{q_len} queries over {kv_len} latents, expanded for some heads at a time", within=within)


def test_where_both_ways_take_as_much_nothing_is_expanded():
    """Keys and values of a piece would only take memory."""
    config = config_of(qk_nope_head_dim=9, v_head_dim=7, kv_lora_rank=8)
    expanded, absorbed = multiplications(config, 5, 5)
    assert expanded == absorbed and expanding_pays(config, 5, 5) is False
