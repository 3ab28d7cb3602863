"""Lesson 16. The two ways to read latents: expand them to keys and values, or let queries and results absorb kv_b.

    kv_b      [H, nope + v, rank]     W_UK and W_UV of each head, one above the other
    key       W_UK c ; k_rope         value  W_UV c

Expanded is ordinary attention: it multiplies each latent by kv_b, for every head. Absorbed reorders the products,
q · (W_UK c) = (W_UKᵀ q) · c and Σ p (W_UV c) = W_UV (Σ p c): queries and results are multiplied instead, and latents
are read as they are. `expanding_pays` counts which is less work.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mini_engine.attention.reference import gather
from mini_engine.latents.attention import RunningSums, hide_later
from mini_engine.latents.contract import Widen, as_it_is
from mini_engine.latents.latent_config import LatentConfig

PIECE = 2048  # latents expanded at a time: the keys of a long history would not all fit in memory


def absorbed_attention(
    q: Tensor, kv_b: Tensor, config: LatentConfig, attend: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Attend to latents as they are: queries absorb W_UK first, and W_UV is applied to the sums afterwards.

    Args:
        q: `[T, H, nope + rope]`. kv_b: `[H, nope + v, rank]`.
        attend: a kernel bound to some tables, called once. It takes queries `[T, H, rank]` and their RoPE part
            `[T, H, rope]`, scales scores, and returns each head's weighted sum of latents `[T, H, rank]`.

    Returns:
        `[T, H, v]`.
    """
    q_nope, q_rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=2)
    w_uk, w_uv = kv_b.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
    sums = attend(torch.einsum("thn,hnr->thr", q_nope, w_uk), q_rope)
    return torch.einsum("thr,hvr->thv", sums, w_uv)


def expand(c: Tensor, r: Tensor, kv_b: Tensor, config: LatentConfig) -> tuple[Tensor, Tensor]:
    """Return each head's keys and values.

    Args:
        c: latents `[n, rank]`. r: rotary keys `[n, rope]`. kv_b: `[H, nope + v, rank]`.

    Returns:
        `[n, H, nope + rope]` and `[n, H, v]`.
    """
    both = torch.einsum("nr,hdr->nhd", c, kv_b)
    k_nope, v = both.split((config.qk_nope_head_dim, config.v_head_dim), dim=2)
    return torch.cat((k_nope, r[:, None].expand(-1, len(kv_b), -1)), dim=2), v


def expanded_attention(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    block_ids: Tensor,
    kv_len: int,
    kv_b: Tensor,
    config: LatentConfig,
    widen: Widen = as_it_is,
) -> Tensor:
    """Attend with one sequence's last q_len tokens to keys and values expanded from its latents, piece by piece.

    Args:
        q: `[q_len, H, nope + rope]`. Query i sees tokens 0 … kv_len - q_len + i.
        caches: one layer's latents and rotary keys. block_ids: `[max_blocks]`, the sequence's row of the block table.
        widen: turns rows of the caches into vectors: the kernel's own, `kernel.widen`.

    Returns:
        `[q_len, H, v]` in float32.
    """
    block_size, running = caches[0].shape[1], RunningSums(q)
    step = max(1, PIECE // block_size) * block_size
    for start in range(0, kv_len, step):
        ids, size = block_ids[start // block_size :], min(step, kv_len - start)
        c = widen(gather(caches[0], ids, size), config.kv_lora_rank, q.dtype)[:, 0]
        r = widen(gather(caches[1], ids, size), config.qk_rope_head_dim, q.dtype)[:, 0]
        k, v = expand(c, r, kv_b, config)
        scores = hide_later(torch.einsum("qhd,khd->qhk", q, k).float() * config.attention_scale, start, kv_len)
        running.add(scores, lambda weights, v=v: torch.einsum("qhk,khv->qhv", weights.to(v.dtype), v))
    return running.result()


def multiplications(config: LatentConfig, q_len: int, kv_len: int) -> tuple[int, int]:
    """Return the multiplications in a layer for q_len queries over kv_len tokens: (expanded, absorbed).

    kv_b is multiplied by every latent, or by every query and every result. Then each query of each head is multiplied
    with each token: nope + rope + v elements, or the latent twice and the rotary key.
    """
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    kv_b = heads * rank * (config.qk_nope_head_dim + config.v_head_dim)
    pairs = heads * q_len * kv_len
    expanded = kv_len * kv_b + pairs * (config.qk_head_dim + config.v_head_dim)
    absorbed = q_len * kv_b + pairs * (2 * rank + config.qk_rope_head_dim)
    return expanded, absorbed


def expanding_pays(config: LatentConfig, q_len: int, kv_len: int) -> bool:
    """Return True if q_len queries over kv_len tokens take fewer multiplications with expanded latents."""
    expanded, absorbed = multiplications(config, q_len, kv_len)
    return expanded < absorbed
