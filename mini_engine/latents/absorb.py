"""Lesson 16. `absorbed_attention` with its two products in C++, `absorb.cpp`: torch's take longer than attention."""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.base.native_build import Library, Signature
from mini_engine.latents.latent_config import LatentConfig

HERE = Path(__file__).parent


class HeadsProduct(ctypes.Structure):
    """A product for each head; `absorb.h` has the same struct. Strides count elements."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "w", "out")),
        *((name, c_int64) for name in ("rows", "heads", "inputs", "outputs")),
        *((name, c_int64) for name in ("x_stride", "x_head_stride", "w_head_stride")),
    )


PRODUCT = Signature((POINTER(HeadsProduct), c_int), None)
LIBRARY = Library(
    (HERE / "absorb.cpp", HERE / "absorb.h", HERE.parent / "attention" / "vectors.h"),
    {"to_latents": PRODUCT, "from_latents": PRODUCT},
)


def absorbed_attention(
    q: Tensor, kv_b: Tensor, config: LatentConfig, attend: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Compute what `reading.absorbed_attention` does, to rounding. kv_b has q's dtype: float32 or bfloat16."""
    q_nope, q_rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=2)
    w_uk, w_uv = kv_b.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
    sums = attend(product("to_latents", q_nope, w_uk, config.kv_lora_rank), q_rope)
    return product("from_latents", sums, w_uv, config.v_head_dim)


def product(name: str, x: Tensor, w: Tensor, outputs: int) -> Tensor:
    """Return `[T, H, outputs]`: x `[T, H, inputs]` times each head's matrix of w, whose rows are contiguous."""
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty(*x.shape[:2], outputs)
    pointers = dict(x=x.data_ptr(), w=w.data_ptr(), out=out.data_ptr())
    strides = dict(x_stride=x.stride(0), x_head_stride=x.stride(1), w_head_stride=w.stride(0))
    sizes = HeadsProduct(rows=len(x), heads=x.shape[1], inputs=x.shape[2], outputs=outputs, **pointers, **strides)
    LIBRARY.function(name, x.dtype)(sizes, torch.get_num_threads())
    return out
