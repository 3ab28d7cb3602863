"""Lesson 9. A model's last norm in one call of `layers.cpp`: torch's six operations cost more than they compute."""

from typing import Any

import torch
from torch import Tensor, nn

from mini_engine.layers import native


class PackedNorm(nn.Module):
    """RMSNorm with the bits of the norms inside C++ layers.

    Args:
        norm: has a weight, or a `scale` in its place, that multiplies the normed values.
    """

    def __init__(self, functions: native.Functions, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps, self.norm = norm.weight.data, norm.eps, functions.norm
        self.scale = getattr(norm, "scale", self.weight).float()

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed rows of x `[T, width]`; ValueError if C++ cannot read them."""
        if x.shape[1:] != self.scale.shape or x.dtype != self.weight.dtype or x.stride(1) != 1:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}; this norm takes {self.weight.dtype} [T, {len(self.scale)}]"
            )
        out = x.new_empty(x.shape)
        size = (*x.shape, x.stride(0))
        self.norm(x.data_ptr(), *size, self.scale.data_ptr(), self.eps, out.data_ptr(), torch.get_num_threads())
        return out
