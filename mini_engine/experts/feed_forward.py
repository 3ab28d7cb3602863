"""Course machinery. The feed-forward block of a layer with experts."""

from typing import Any

from torch import Tensor, nn


class SparseFeedForward(nn.Module):
    """Routed experts and, in some models, one that every token passes. Takes the place of lesson 0's SwiGLU.

    In a process with a share of the experts, and of the shared one's columns, results are partial sums.

    Args:
        router: chooses experts and weights. experts: compute them. Names of both are the checkpoint's.
        shared: the expert for all tokens. shared_gate: its result is multiplied by the sigmoid of this layer's.
    """

    def __init__(
        self,
        router: nn.Module,
        experts: nn.Module,
        shared: nn.Module | None = None,
        shared_gate: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.gate: Any = router
        self.experts: Any = experts
        self.shared_expert: Any = shared
        self.shared_expert_gate: Any = shared_gate

    def forward(self, x: Tensor) -> Tensor:
        out = self.experts(x, *self.gate(x))
        if self.shared_expert is None:
            return out
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x).sigmoid() * shared
        return out + shared
