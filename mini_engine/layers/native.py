"""Lesson 9. Python bindings of `layers.cpp`: its structs, its functions and its build.

The structs have the same fields as those in C++, in the same order. Fill them by name: ctypes silently accepts a
pointer where a length belongs.
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from mini_engine.attention.cpu import kernel_address
from mini_engine.errors import UserError
from mini_engine.layers.exchange import Exchange
from mini_engine.native_build import FLAG_SETS, find_or_build

HERE = Path(__file__).parent
SOURCES = (
    *(HERE / name for name in ("layers.cpp", "fused.h", "linear.h")),
    *(HERE.parent / "attention" / name for name in ("paged_cpu.h", "vectors.h")),
)
PARTS = ("norms", "matrices", "heads", "cache writes", "attention", "waiting")
NUM_TIMES = len(PARTS) + 1  # numbers per thread in Step.seconds: each part's seconds, and the end of the last one
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Matrix(ctypes.Structure):
    """A packed weight `[outputs, inputs]` and its bias, if it has one."""

    _fields_ = (("tiles", c_void_p), ("bias", c_void_p), ("outputs", c_int64))


class Shape(ctypes.Structure):
    """The sizes that all layers share."""

    _fields_ = (
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "intermediate")),
        ("eps", c_float),
    )


class Layer(ctypes.Structure):
    """One layer's weights."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
    )


class Memory(ctypes.Structure):
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
        *((name, Memory) for name in ("x", "normed", "qkv", "attended", "activated")),
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
    """Lesson 3's kernel, each layer's cache, and the sizes that the caches share."""

    _fields_ = (
        ("attention", c_void_p),
        ("caches", POINTER(Cache)),
        *((name, c_void_p) for name in ("starts", "sampled_starts", "kv_lens")),
        *((name, c_int64) for name in ("num_seqs", "num_blocks", "block_size")),
        ("scale", c_float),
    )


ARGUMENTS = {
    "linear": (c_void_p, c_int64, c_int64, c_int64, POINTER(Matrix), c_void_p, c_int),
    "before_attention": (POINTER(Shape), POINTER(Layer), POINTER(Step), c_int),
    "after_attention": (POINTER(Shape), POINTER(Layer), POINTER(Step), c_int),
    "run_layers": (POINTER(Shape), POINTER(Layer), c_int, POINTER(Step), POINTER(Pool), c_int),
}


class Functions:
    """The functions of one dtype; `ARGUMENTS` lists their parameters."""

    linear: Callable[..., None]
    before_attention: Callable[..., None]
    after_attention: Callable[..., None]
    run_layers: Callable[..., int]

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, f"{name}_{SUFFIXES[dtype]}")
            function.argtypes, function.restype = arguments, c_int if name == "run_layers" else None
            setattr(self, name, function)

    @functools.cached_property
    def attention(self) -> c_void_p:
        """Lesson 3's kernel for this dtype, which `run_layers` calls."""
        return kernel_address(self.dtype)


def load(dtype: torch.dtype) -> Functions:
    """Return the functions for weights of this dtype, building the library first if necessary.

    Raises:
        UserError: the dtype is not supported, or the library cannot be built here.
    """
    if dtype not in SUFFIXES:
        raise UserError(f"packed weights are float32 or bfloat16, not {dtype}; the torch backend takes any dtype")
    library = _library()
    if isinstance(library, UserError):
        raise UserError(str(library))
    return Functions(library, dtype)


@functools.cache
def _library() -> ctypes.CDLL | UserError:
    """Return the library, or the error of its build: a process does not repeat a failed build."""
    try:
        return build(FLAG_SETS)
    except UserError as why:
        return why


def build(flag_sets: tuple[tuple[str, ...], ...]) -> ctypes.CDLL:
    """Build the library with the first of `flag_sets` that works. The flags select the processor's instructions."""
    return find_or_build(SOURCES, lambda path: ctypes.CDLL(str(path)), flag_sets)
