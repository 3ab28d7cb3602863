"""Lesson 17. Rotation before rounding: each number of a rotated vector is a mix of all numbers of the vector.

A channel that is much larger than the others takes up nearly all levels of its group. All entries of a Hadamard matrix
have the same magnitude, so it spreads such a channel evenly over all numbers. It is orthonormal, so lengths and
products of vectors do not change, (H q) · (H k) = q · k; and it is symmetric, so it is its own inverse.
"""

import functools

import torch
from torch import Tensor


def hadamard(n: int) -> Tensor:
    """Return the orthonormal Hadamard matrix `[n, n]`, float32 (Sylvester's construction).

    Raises:
        ValueError: n is not a power of two.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"there is no such Hadamard matrix of {n} rows; use a power of two")
    signs = torch.ones(1, 1)
    while len(signs) < n:
        signs = torch.cat((torch.cat((signs, signs), dim=1), torch.cat((signs, -signs), dim=1)))
    return signs / n**0.5


def block_of(dim: int) -> int:
    """Return the largest power of two that divides `dim`: the number of elements that are mixed with each other."""
    return dim & -dim


def rotate(x: Tensor) -> Tensor:
    """Return vectors x `[..., D]` rotated, in x's dtype, computed in float32. Rotating twice gives x back."""
    n = block_of(x.shape[-1])
    return (x.float().reshape(-1, n) @ _matrix(n, x.device)).view(x.shape).to(x.dtype)


@functools.cache
def _matrix(n: int, device: torch.device) -> Tensor:
    """Return the Hadamard matrix on this device, copied once: a captured step may not copy it there."""
    with torch.inference_mode(False):
        return hadamard(n).to(device)
