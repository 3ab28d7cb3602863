"""Course machinery. Routers: which experts each token is sent to, and what weight their answers have.

A router maps x `[T, hidden_size]` to experts `[T, k]` int64 and weights `[T, k]` float32. Its `rules` say the same in
numbers, for `router.h`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Rules(NamedTuple):
    """How a router chooses.

    top_k: experts of a token. rounds: logits and weights are rounded to the dtype of x.
    has_sigmoids: scores are sigmoids of the logits, otherwise probabilities. bias: `[E]`, added for the choice alone.
    normalizes: a token's weights are divided by their sum + epsilon. scale: multiplies the weights afterwards.
    groups, kept, judges: experts form groups; a token's come from the `kept` groups whose `judges` best experts have
        the largest sums.
    """

    top_k: int
    rounds: bool = False
    has_sigmoids: bool = False
    bias: Tensor | None = None
    normalizes: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    kept: int = 1
    judges: int = 1


class SoftmaxRouter(nn.Module):
    """Sends each token to its k most probable experts; weights are probabilities (Shazeer et al., 2017,
    arXiv:1701.06538).

    Args:
        normalize: weights of a token add up to 1; otherwise they are its probabilities among all experts.
    """

    def __init__(self, num_experts: int, top_k: int, hidden: int, normalize: bool) -> None:
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))

    @property
    def rules(self) -> Rules:
        """How it chooses, in numbers."""
        return Rules(self.top_k, rounds=True, normalizes=self.normalize)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = F.linear(x, self.weight).softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts, weights.to(x.dtype).float()  # rounded as in Hugging Face's code
