"""Course machinery. The part of torch that a page has: tensors in plain Python, with shapes, dtypes and views.

What is here gives torch's results (tests/course/test_small_torch.py), floats to within rounding where torch adds in
another order. Anything else raises NotInThePage.
"""

import math
from collections.abc import Callable
from inspect import isfunction
from types import SimpleNamespace
from typing import Any

from scripts.live.small import along, chance, elementwise, probabilities, products
from scripts.live.small.indexing import Indexed
from scripts.live.small.modes import UNSEEN, Mode, StorageWeakRef, carried, leaves
from scripts.live.small.strided import (
    DTYPES,
    FLOAT,
    Dtype,
    NotInThePage,
    Size,
    float16,
    float32,
    float64,
    int64,
    packed,
    sizes_of,
)
from scripts.live.small.tensor import CPU, OPERATIONS, Device, Tensor, operation
from scripts.live.small.views import Views

__all__ = ["SMALL", "NotInThePage", "Tensor"]

LARGEST = {"float16": 65504.0, "bfloat16": 2.0**127 * (2 - 2.0**-7), "float32": 2.0**127 * (2 - 2.0**-23),
           "float64": 2.0**1023 * (2 - 2.0**-52)}  # fmt: skip
TINY = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


class Inference:
    """A mode such as inference, which changes nothing here: a decorator, or a context."""

    def __init__(self, mode: Any = True) -> None:
        pass

    def __new__(cls, mode: Any = True) -> Any:
        return mode if callable(mode) else super().__new__(cls)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: Any) -> None:
        pass


# ---- making tensors ----


@operation
def tensor(data: Any, dtype: Dtype | None = None, device: Any = CPU) -> Tensor:
    shape, numbers = measured(data)
    kinds = {type(number) for number in numbers}
    guess = float32 if float in kinds or not kinds else int64 if int in kinds else elementwise.KINDS[bool]
    if isinstance(data, Tensor):
        guess = data.dtype
    return Tensor(packed(numbers, dtype or guess), dtype or guess, shape, device=Device(device))


def measured(data: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape of nested lists, and their numbers."""
    if isinstance(data, Tensor):
        return data.shape, data.values
    if not hasattr(data, "__len__"):
        return (), [data]
    rows = [measured(row) for row in data]
    if len({shape for shape, _ in rows}) > 1:
        raise ValueError(f"expected sequence of equal lengths, but got shapes {sorted({shape for shape, _ in rows})}")
    return (len(rows), *(rows[0][0] if rows else ())), [number for _, numbers in rows for number in numbers]


def as_tensor(data: Any, dtype: Dtype | None = None, device: Any = CPU) -> Tensor:
    return data.to(dtype or data.dtype) if isinstance(data, Tensor) else tensor(data, dtype, device)


def arange(*bounds: Any, dtype: Dtype | None = None, device: Any = CPU, out: Tensor | None = None) -> Tensor:
    if out is not None:
        return out.copy_(arange(*bounds, dtype=dtype))
    ends = [end.item() if isinstance(end, Tensor) else end for end in bounds]
    if all(isinstance(end, int) for end in ends):
        return tensor(list(range(*ends)), dtype or int64, device)
    begin, end, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    return tensor([begin + i * step for i in range(math.ceil((end - begin) / step))], dtype or float32, device)


def filled(number: float) -> Callable[..., Tensor]:
    def make(*shape: Any, dtype: Dtype | None = None, device: Any = CPU, **rest: Any) -> Tensor:
        sizes = [int(size) for size in sizes_of(shape)]
        kind = dtype or float32
        return Tensor(packed([number] * Size(sizes).numel(), kind), kind, sizes, device=Device(device))

    return make


zeros, ones = filled(0), filled(1)
OPERATIONS["ones"] = ones


def full(shape: Any, fill_value: Any, dtype: Dtype | None = None, device: Any = CPU) -> Tensor:
    return filled(fill_value)(sizes_of((shape,)), dtype=dtype or elementwise.KINDS[type(fill_value)], device=device)


def like(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of(one: Tensor, *given: Any, dtype: Dtype | None = None, device: Any = None, **rest: Any) -> Tensor:
        return make(one.shape, *given, dtype=dtype or one.dtype, device=device or one.device)

    return of


def new(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of(one: Tensor, *given: Any, dtype: Dtype | None = None, device: Any = None) -> Tensor:
        return make(*given, dtype=dtype or one.dtype, device=device or one.device)

    return of


for name, make in {"zeros": zeros, "ones": ones, "empty": zeros, "full": full}.items():
    OPERATIONS |= {f"{name}_like": like(make), f"new_{name}": new(make)}
OPERATIONS["new_tensor"] = new(tensor)


def eye(n: int, m: int | None = None, dtype: Dtype | None = None) -> Tensor:
    return tensor([[float(i == j) for j in range(m or n)] for i in range(n)], dtype or float32)


def frombuffer(buffer: Any, dtype: Dtype) -> Tensor:
    raw = memoryview(buffer).cast("B")
    return Tensor(raw, dtype, (len(raw) // dtype.itemsize,))


# ---- the rest ----


def finfo(dtype: Dtype = float32) -> SimpleNamespace:
    name = dtype.name
    limits = {"max": LARGEST[name], "min": -LARGEST[name], "tiny": TINY[name], "smallest_normal": TINY[name]}
    return SimpleNamespace(**limits, eps=EPS[name], bits=8 * dtype.itemsize, dtype=name)


def iinfo(dtype: Dtype) -> SimpleNamespace:
    bits, is_unsigned = 8 * dtype.itemsize, dtype.code.isupper()
    return SimpleNamespace(
        max=2 ** (bits - (not is_unsigned)) - 1, min=0 if is_unsigned else -(2 ** (bits - 1)), bits=bits
    )


def assert_close(
    actual: Tensor, expected: Tensor, rtol: float | None = None, atol: float | None = None, msg: Any = None, **rest: Any
) -> None:
    default = {"float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}
    near = default.get(actual.dtype.name, (0.0, 0.0)) if rtol is None or atol is None else (rtol, atol)
    if actual.shape == expected.shape and actual.dtype is expected.dtype and actual.allclose(expected, *near, **rest):
        return
    text = f"Tensor-likes are not close!\n{actual}\n{expected}"
    raise AssertionError(msg(text) if callable(msg) else msg or text)


METHODS = ("flatten", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "clone", "numel", "narrow", "select")
OPERATIONS |= {name: carried(name, function) for name, function in OPERATIONS.items()}
for kind in (Views, Indexed, Tensor):
    for name, method in list(vars(kind).items()):
        if isfunction(method) and name not in UNSEEN:
            setattr(kind, name, carried(name, method))
FUNCTIONAL = {
    "pad": products.pad, "linear": products.linear, "rms_norm": products.rms_norm, "one_hot": products.one_hot,
    "scaled_dot_product_attention": products.scaled_dot_product_attention,
    "softmax": probabilities.softmax, "log_softmax": probabilities.log_softmax, "kl_div": probabilities.kl_div,
    "cross_entropy": probabilities.cross_entropy,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {  # of each module, the names that it has
    "torch": {
        **OPERATIONS, **{name: getattr(Tensor, name) for name in METHODS},
        **{dtype.name: dtype for dtype in DTYPES},
        "long": int64, "int": DTYPES[4], "float": float32, "double": float64, "half": float16,
        "Tensor": Tensor, "Generator": chance.Generator, "Size": Size, "device": Device, "dtype": Dtype,
        "inf": math.inf,
        "nan": math.nan, "tensor": tensor, "as_tensor": as_tensor, "arange": arange, "zeros": zeros, "ones": ones,
        "empty": zeros, "full": full, "eye": eye, "frombuffer": frombuffer, "manual_seed": chance.manual_seed,
        "randn": chance.randn, "rand": chance.rand, "randint": chance.randint,
        "randperm": chance.randperm, "finfo": finfo, "iinfo": iinfo, "contiguous_format": None,
        "concat": OPERATIONS["cat"], "concatenate": OPERATIONS["cat"],
        "is_tensor": lambda one: isinstance(one, Tensor), "get_num_threads": lambda: 1,
        "LongTensor": lambda data: tensor(data, int64),
        "inference_mode": Inference, "no_grad": Inference, "is_floating_point": lambda one: one.dtype.kind == FLOAT,
    },
    "torch.nn.functional": FUNCTIONAL,
    "torch.linalg": {"vector_norm": along.vector_norm, "norm": along.vector_norm},
    "torch.testing": {"assert_close": assert_close},
    "torch.utils._python_dispatch": {"TorchDispatchMode": Mode},
    "torch.utils._pytree": {"tree_leaves": leaves},
    "torch.multiprocessing.reductions": {"StorageWeakRef": StorageWeakRef},
    "torch.nn.utils.rnn": {"pad_sequence": products.pad_sequence},
    "torch.overrides": {"TorchFunctionMode": Mode},
}  # fmt: skip
for module in SMALL.values():
    known = {one: function for one, function in module.items() if isfunction(function) and one not in OPERATIONS}
    module.update((one, carried(one, function)) for one, function in known.items())
