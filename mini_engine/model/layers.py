"""Lesson 0. The layers of a Qwen3 block whose only state is their weights: RMSNorm, SwiGLU.

Activations are packed: the first dimension is tokens, of one sequence or of many. Casts happen in the same order as in
Hugging Face's code, because a norm that rounds to bfloat16 one operation too early changes tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` without random initial weights: every weight comes from a checkpoint."""

    def reset_parameters(self) -> None:
        """Do nothing. Even on the meta device, random numbers would make torch import its compiler: about a second."""


class Embedding(nn.Embedding):
    """`nn.Embedding` without random initial weights."""

    def reset_parameters(self) -> None:
        """Do nothing, as in `Linear`."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019, arXiv:1910.07467).

    Mean and division are computed in float32; the result is cast back before it is multiplied by the weight.
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
    """The feed-forward block, down(silu(gate(x)) * up(x)) (Shazeer, 2020, arXiv:2002.05202).

    Args:
        act: another function in place of silu.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, act: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.act = act
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
