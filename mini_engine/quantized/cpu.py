"""Lesson 17. The C++ kernels for rows: lesson 3's with another way to load keys and values.

int8_cpu.cpp and int4_cpu.cpp have a function for each dtype of the queries; each file is compiled on first use.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY, Batch
from mini_engine.attention.cpu import ATTENTION, HEADERS, call
from mini_engine.base.native_build import Library

HERE = Path(__file__).parent
LIBRARIES = {
    "int8": Library((HERE / "int8_cpu.cpp", *HEADERS), {"paged_attention_int8": ATTENTION}),
    "int4": Library((HERE / "int4_cpu.cpp", HERE / "int4_rows.h", *HEADERS), {"paged_attention_int4": ATTENTION}),
}


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int = EVERY_KEY, *, rows: str
) -> Tensor:
    """Implement the contract for caches of these rows; q's dtype selects the function."""
    return call(function_for(rows, q.dtype), q, k_cache, v_cache, batch, scale, window)


def function_for(rows: str, dtype: torch.dtype) -> Callable[..., int]:
    """Return the compiled function for these rows and queries of this dtype; UserError if there is none."""
    return LIBRARIES[rows].function(f"paged_attention_{rows}", dtype)
