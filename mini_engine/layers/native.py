"""Lesson 9. Python bindings of `layers.cpp`: its structs, its functions and its build.

The structs have the same fields as those in C++, in the same order. Fill them by name: ctypes silently accepts a
pointer where a length belongs.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from mini_engine.base.native_build import Library, Signature
from mini_engine.layers.exchange import Exchange

HERE = Path(__file__).parent
SOURCES = (
    *(HERE / name for name in ("layers.cpp", "fused.h", "linear.h", "pool.h")),
    *(HERE.parent / "attention" / name for name in ("paged_cpu.h", "vectors.h")),
)
PARTS = ("norms", "matrices", "heads", "cache writes", "attention", "waiting")
NUM_TIMES = len(PARTS) + 1  # numbers per thread in Step.seconds: each part's seconds, and the end of the last one


class Matrix(ctypes.Structure):
    """A packed weight `[outputs, inputs]` and its bias, if it has one."""

    _fields_ = (("tiles", c_void_p), ("bias", c_void_p), ("outputs", c_int64))


class Shape(ctypes.Structure):
    """The sizes that all layers share."""

    _fields_ = (*((name, c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "intermediate")), ("eps", c_float))


class Layer(ctypes.Structure):
    """One layer's weights."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
    )


class Place(ctypes.Structure):
    """Rows that start `stride` elements apart."""

    _fields_ = (("data", c_void_p), ("stride", c_int64))


class ExchangeStruct(ctypes.Structure):
    """The completion of partial sums. failed: the result of `add_up`."""

    _fields_ = (("add_up", c_void_p), ("meeting", c_void_p), ("is_first", c_int64), ("failed", c_int64))


def exchange_struct(exchange: Exchange, dtype: torch.dtype) -> ExchangeStruct:
    """Return the struct of an exchange that C++ can call; the exchange must outlive it."""
    called = exchange.native(dtype)
    assert called is not None  # for others, `speed_up` uses torch's layers
    return ExchangeStruct(called.add_up, called.meeting, called.is_first, 0)


class Step(ctypes.Structure):
    """One step's activations."""

    _fields_ = (
        ("tokens", c_int64),
        *((name, Place) for name in ("x", "normed", "qkv", "attended", "activated")),
        *((name, c_void_p) for name in ("cos", "sin", "sampled")),
        ("samples", c_int64),
        ("seconds", c_void_p),
        ("exchange", POINTER(ExchangeStruct)),
    )


class Cache(ctypes.Structure):
    """One layer's K and V, its slots and its table in a step."""

    _fields_ = (
        *((name, c_void_p) for name in ("k", "v", "slots", "table")),
        *((name, c_int64) for name in ("max_blocks", "window")),
    )


class Pool(ctypes.Structure):
    """The pool's functions, each layer's cache, and the sizes that the caches share."""

    _fields_ = (
        ("write", c_void_p),
        ("attention", c_void_p),
        ("caches", POINTER(Cache)),
        *((name, c_void_p) for name in ("starts", "sampled_starts", "kv_lens")),
        *((name, c_int64) for name in ("num_seqs", "num_blocks", "block_size")),
        ("scale", c_float),
    )


LAYER = (POINTER(Shape), POINTER(Layer))
FUNCTIONS = {
    "linear": Signature((c_void_p, c_int64, c_int64, c_int64, POINTER(Matrix), c_void_p, c_int), None),
    "norm": Signature((c_void_p, c_int64, c_int64, c_int64, c_void_p, c_float, c_void_p, c_int), None),
    "before_attention": Signature((*LAYER, POINTER(Step), c_int), None),
    "after_attention": Signature((*LAYER, POINTER(Step), c_int), None),
    "run_layers": Signature((*LAYER, c_int, c_void_p, POINTER(Step), POINTER(Pool), c_int)),
}
LIBRARY = Library(SOURCES, FUNCTIONS, "the packed backend", "the torch backend takes any dtype")


class Functions:
    """The functions for weights of one dtype; `FUNCTIONS` lists their parameters.

    Raises:
        UserError: the dtype is not supported, or the library cannot be built here.
    """

    linear: Callable[..., None]
    norm: Callable[..., None]
    before_attention: Callable[..., None]
    after_attention: Callable[..., None]
    run_layers: Callable[..., int]

    def __init__(self, dtype: torch.dtype, library: Library = LIBRARY) -> None:
        self.dtype = dtype
        for name in FUNCTIONS:
            setattr(self, name, library.function(name, dtype))
