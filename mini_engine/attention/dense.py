"""Lesson 0. Causal attention of one sequence whose keys and values are stored in order."""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Scaled dot-product attention with grouped heads (Vaswani et al., 2017; Ainslie et al., 2023).

    The queries are the last `q_len` tokens of the sequence, so the causal mask is bottom-right: query i sees keys
    0 … kv_len - q_len + i. With q_len = kv_len that is the usual triangle; with q_len = 1 nothing is masked.

    Args:
        q: `[q_len, H_q, D]`. Query head h reads key/value head h // (H_q // H_kv).
        k, v: `[kv_len, H_kv, D]`, kv_len >= q_len, with q's dtype and on q's device.
        scale: factor applied to q·k; None stands for D ** -0.5.

    Returns:
        `[q_len, H_q, D]`, with q's dtype and on q's device; q, k and v are not modified.
    """
    q_len, kv_len = len(q), len(k)
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - q_len)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, len, D]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
