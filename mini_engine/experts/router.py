"""Course machinery. Routers: which experts each token is sent to, and what weight their answers have.

A router maps x `[T, hidden_size]` to experts `[T, k]` int64 and weights `[T, k]` float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = F.linear(x, self.weight).softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts, weights.to(x.dtype).float()  # rounded as in Hugging Face's code
