"""Lesson 16. `expanded_attention` with lesson 3's kernel in C++: a head's keys and values are a cache of one block.

It expands the whole history for some heads at a time, where the plain way expands a piece of it for all heads: so no
sums have to be merged, and memory has a bound, too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.contract import Batch
from mini_engine.attention.cpu import paged_attention
from mini_engine.attention.reference import gather
from mini_engine.latents.contract import Widen, as_it_is
from mini_engine.latents.latent_config import LatentConfig

MOST_BYTES = 64 * 2**20  # of keys and values at a time, unless one head has more


def expanded_attention(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    block_ids: Tensor,
    kv_len: int,
    kv_b: Tensor,
    config: LatentConfig,
    widen: Widen = as_it_is,
) -> Tensor:
    """Compute what `reading.expanded_attention` does, to rounding, but in q's dtype: float32 or bfloat16."""
    width = max(config.qk_head_dim, config.v_head_dim)  # the kernel has one for keys and values
    c = widen(gather(caches[0], block_ids, kv_len), config.kv_lora_rank, q.dtype)[:, 0]
    r = widen(gather(caches[1], block_ids, kv_len), config.qk_rope_head_dim, q.dtype)
    q = F.pad(q, (0, width - q.shape[2])) if q.shape[2] < width else q
    heads = max(1, MOST_BYTES // (2 * kv_len * width * q.element_size()))
    out = q.new_empty(*q.shape[:2], config.v_head_dim)
    rows, lengths, table = ([0, len(q)], [kv_len], [[0]])
    batch = Batch(*(torch.tensor(x, dtype=torch.int32) for x in (rows, lengths, table)))
    for first in range(0, q.shape[1], heads):
        some = slice(first, first + heads)
        k, v = keys_and_values(c, r, kv_b[some], width, config)
        out[:, some] = paged_attention(q[:, some], k, v, batch, config.attention_scale)[..., : config.v_head_dim]
    return out


def keys_and_values(c: Tensor, r: Tensor, kv_b: Tensor, width: int, config: LatentConfig) -> tuple[Tensor, Tensor]:
    """Return these heads' keys and values as a cache of one block, `[1, n, H, width]` each, zeros past their ends.

    Args:
        c: latents `[n, rank]`. r: rotary keys `[n, 1, rope]`. kv_b: `[H, nope + v, rank]`.
    """
    both = F.linear(c, kv_b.flatten(0, 1)).view(len(c), *kv_b.shape[:2])
    k_nope, v = both.split((config.qk_nope_head_dim, config.v_head_dim), dim=2)
    keys, values = (both.new_empty(1, *both.shape[:2], width) for _ in range(2))
    for to, parts in ((keys, (k_nope, r)), (values, (v,))):
        end = 0
        for part in parts:
            to[..., end : end + part.shape[2]] = part
            end += part.shape[2]
        to[..., end:] = 0
    return keys, values
