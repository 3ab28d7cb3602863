"""Course machinery. Muon's Newton-Schulz iteration in float32: torch's computes in bfloat16, whatever the weights are.

On a processor without instructions for bfloat16 that is twenty times slower, and takes most of a training step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

FUNCTION = "torch.optim._muon._zeropower_via_newtonschulz"


def orthogonalized(grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
    """Return a matrix with the singular vectors of `grad`, and singular values near one (Jordan, 2024)."""
    a, b, c = ns_coefficients
    is_tall = grad.size(0) > grad.size(1)
    x = grad.T if is_tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


@contextmanager
def muon_in_float32(on: bool) -> Iterator[None]:
    """Let torch's Muon use `orthogonalized` inside the block; torch has no option for it."""
    if not on:
        yield
        return
    with patch(FUNCTION, orthogonalized):
        yield
