"""Lesson 10. The operations between a layer's matrices, as three Triton kernels.

Each reads its inputs once and writes its result once, where torch makes a round trip to memory for every operation.
Numbers are rounded to the model's dtype in the same places as in lesson 0: float32 inside a kernel, a cast where lesson
0 has one. So the tokens are the same.

No argument that Triton specializes on changes from step to step, so each kernel is compiled once per model.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.attention.triton_launch import power_of_2

SILU_BLOCK = 1024  # columns of one program


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to x in place and return the RMSNorm of the sum. x, delta, result `[T, hidden_size]`; weight its row.

    Without a delta, x does not change.
    """
    out = torch.empty_like(x)
    if len(x):
        given = x if delta is None else delta.contiguous()
        _add_norm[(len(x),)](x, given, weight, out, eps, **norm_constants(x.shape[1], delta is not None))
    return out


def norm_constants(size: int, adds: bool) -> dict[str, Any]:
    """Return the constants that Triton compiles into `_add_norm`."""
    width = power_of_2(size)
    return dict(SIZE=size, WIDTH=width, ADDS=adds, num_warps=min(8, max(1, width // 256)))


def norm_rope(
    qkv: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, eps: float, rows: Tensor, k_out: Tensor, v_out: Tensor
) -> Tensor:
    """Norm and rotate the heads of q and k; return q `[T, H_q, D]` and write k and v into their rows.

    Args:
        qkv: `[T, (H_q + 2 * H_kv) * D]`, contiguous.
        weights: `[2, D]`, of q's norm and of k's.
        cos, sin: `[T, D]`, as from lesson 0's RotaryEmbedding.
        rows: `[T]` int64, the row of k_out and v_out that each token's k and v are written to; not checked.
        k_out, v_out: `[..., H_kv, D]`, contiguous, in qkv's dtype, written in place.
    """
    kv_heads, dim = k_out.shape[-2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q_out = qkv.new_empty(len(qkv), heads, dim)
    if len(qkv):
        _norm_rope[(len(qkv), heads + 2 * kv_heads)](
            qkv, weights, cos, sin, rows, q_out, k_out, v_out, eps, **rope_constants(heads, kv_heads, dim)
        )
    return q_out


def rope_constants(heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    """Return the constants that Triton compiles into `_norm_rope`."""
    return dict(HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, WIDTH=power_of_2(dim // 2), num_warps=1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up. gate_up `[T, 2 * I]` contiguous, the gates first; result `[T, I]`."""
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), size)
    if len(gate_up):
        constants = silu_constants(size)
        _silu_mul[(len(gate_up), triton.cdiv(size, constants["BLOCK"]))](gate_up, out, **constants)
    return out


def silu_constants(size: int) -> dict[str, Any]:
    """Return the constants that Triton compiles into `_silu_mul`."""
    return dict(SIZE=size, BLOCK=min(SILU_BLOCK, power_of_2(size)), num_warps=4)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Return float32 x rounded to DTYPE's precision, as between two operations in lesson 0."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _add_norm(x, delta, weight, out, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, WIDTH)
    real = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        value = _rounded(value + tl.load(delta + at, mask=real, other=0.0).to(tl.float32), DTYPE)
        tl.store(x + at, value.to(DTYPE), mask=real)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = _rounded(value * scale, DTYPE) * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(DTYPE), mask=real)


@triton.jit
def _norm_rope(
    qkv, weights, cos, sin, rows, q_out, k_out, v_out, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    DIM: tl.constexpr = 2 * HALF
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, WIDTH)  # a head's pairs are (i, i + DIM / 2)
    real = pair < HALF
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM + pair
    first = tl.load(source, mask=real, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
    if head >= HEADS + KV_HEADS:
        target = v_out + (tl.load(rows + token).to(tl.int64) * KV_HEADS + head - HEADS - KV_HEADS) * DIM
    else:
        norm = weights + pair
        target = q_out + (token * HEADS + head) * DIM
        if head >= HEADS:
            norm += DIM
            target = k_out + (tl.load(rows + token).to(tl.int64) * KV_HEADS + head - HEADS) * DIM
        scale = tl.rsqrt(tl.sum(first * first + second * second, 0) / DIM + eps)
        first = _rounded(_rounded(first * scale, DTYPE) * tl.load(norm, mask=real, other=0.0).to(tl.float32), DTYPE)
        second = _rounded(
            _rounded(second * scale, DTYPE) * tl.load(norm + HALF, mask=real, other=0.0).to(tl.float32), DTYPE
        )
        c = tl.load(cos + token * DIM + pair, mask=real, other=0.0).to(tl.float32)
        s = tl.load(sin + token * DIM + pair, mask=real, other=0.0).to(tl.float32)
        turned = _rounded(first * c, DTYPE) - _rounded(second * s, DTYPE)
        second = _rounded(second * c, DTYPE) + _rounded(first * s, DTYPE)
        first = turned
    tl.store(target + pair, first.to(DTYPE), mask=real)
    tl.store(target + HALF + pair, second.to(DTYPE), mask=real)


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    DTYPE: tl.constexpr = gate_up.dtype.element_ty
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (_rounded(gate / (1.0 + tl.exp(-gate)), DTYPE) * up).to(DTYPE), mask=real)
