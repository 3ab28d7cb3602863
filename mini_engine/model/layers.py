"""Lesson 0. The layers of a Qwen3 block that hold no state but their weights.

Activations are packed: the first dimension is tokens, whoever they belong to. The order of casts is Hugging Face's,
because a norm rounded to bfloat16 one operation too early changes tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` without random initial weights: every weight comes from a checkpoint."""

    def reset_parameters(self) -> None:
        """Do nothing. Even on the meta device, random numbers would make torch import its compiler: a second."""


class Embedding(nn.Embedding):
    """`nn.Embedding` without random initial weights."""

    def reset_parameters(self) -> None:
        """Do nothing, as in `Linear`."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019).

    The mean and the division are done in float32; the result is cast back before the weight multiplies it.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class SwiGLU(nn.Module):
    """The feed-forward block: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_cos_sin(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles (Su et al., 2021).

    Args:
        positions: `[T]` int64, each token's place in its own sequence.
        head_dim: D, even.
        theta: the base of the angles, `rope_theta` in config.json.
        dtype: of the result; the angles themselves are float32.

    Returns:
        cos and sin, each `[T, D]`: D/2 angles, written twice, as rotate-half wants them.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head's pairs (i, i + D/2) by the token's angles. x `[T, H, D]`; cos and sin `[T, D]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
