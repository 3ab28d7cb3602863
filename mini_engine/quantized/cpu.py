"""Lesson 17. The C++ functions for rows: lesson 3's kernel with another way to load keys and values, and their writers.

int8_cpu.cpp and int4_cpu.cpp have a function for each dtype of the queries; each file is compiled on first use.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY, Batch, Native
from mini_engine.attention.cpu import ATTENTION, HEADERS, WRITE, call
from mini_engine.base.native_build import Library

HERE = Path(__file__).parent
CODES = (HERE / "codes.h", HERE / "code_scores.h", HERE / "code_values.h", *HEADERS)
LIBRARIES = {
    "int8": Library(
        (HERE / "int8_cpu.cpp", HERE / "int8_codes.h", *CODES),
        {"paged_attention_int8": ATTENTION, "write_slot_int8": WRITE},
    ),
    "int4": Library(
        (HERE / "int4_cpu.cpp", HERE / "int4_codes.h", HERE / "int4_rows.h", HERE / "int4_write.h", *CODES),
        {"paged_attention_int4": ATTENTION, "rotating_attention_int4": ATTENTION, "write_slot_int4": WRITE},
    ),
}


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, window: int = EVERY_KEY, *, rows: str
) -> Tensor:
    """Implement the contract for caches of these rows; q's dtype selects the function."""
    return call(function_for(rows, q.dtype), q, k_cache, v_cache, batch, scale, window)


def function_for(rows: str, dtype: torch.dtype) -> Callable[..., int]:
    """Return the compiled function for these rows and queries of this dtype; UserError if there is none."""
    return LIBRARIES[rows].function(f"paged_attention_{rows}", dtype)


@functools.cache
def native(rows: str, dtype: torch.dtype) -> Native:
    """Return the functions for these rows that C++ calls. They take q, K and V as the model has them, not rotated."""
    library = LIBRARIES[rows]
    attention = "rotating_attention_int4" if rows == "int4" else "paged_attention_int8"
    return Native(library.address(f"write_slot_{rows}", dtype), library.address(attention, dtype))
