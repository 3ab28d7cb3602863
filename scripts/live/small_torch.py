"""Course machinery. A few tensor operations for a page, which has no torch: nested lists with a shape.

Lessons 0 and 1 plan with index tensors and choose by logits; their tests check that with a handful of numbers. The
operations here give torch's results (tests/course/test_small_torch.py); anything else raises NotInThePage.
"""

import random
from collections.abc import Callable, Iterator
from itertools import accumulate, product
from typing import Any, NamedTuple

from scripts.live.nested import Data, both, each, filled_like, flat, nested, picked, plain, shape_of, sizes_of


class NotInThePage(RuntimeError, AttributeError):
    """Code that needs tensors was run where there are none. Also an AttributeError, so that hasattr returns False."""


class Dtype(NamedTuple):
    name: str
    itemsize: int
    of: type

    def __repr__(self) -> str:
        return f"torch.{self.name}"


int64, int32, bool_ = Dtype("int64", 8, int), Dtype("int32", 4, int), Dtype("bool", 1, bool)
float32, float64 = Dtype("float32", 4, float), Dtype("float64", 8, float)


class Device(str):
    """A device's name, as a device."""

    @property
    def type(self) -> str:
        return str(self)


CPU = Device("cpu")


class Size(tuple):
    """A tensor's shape."""


class Best(NamedTuple):
    values: "Tensor"
    indices: "Tensor"


class Tensor:
    """Numbers in nested lists. Indexing copies; assignment to an index writes in place."""

    def __init__(self, data: Data, dtype: Dtype, on: Device = CPU) -> None:
        self.data, self.dtype, self.device = each(dtype.of, data), dtype, on

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotInThePage(f"Tensor.{name} is not in the page, which has few tensors; run this check in a terminal")

    @property
    def shape(self) -> Size:
        return Size(shape_of(self.data))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return len(flat(self.data))

    def dim(self) -> int:
        return len(self.shape)

    def tolist(self) -> Data:
        return each(lambda number: number, self.data)

    def item(self) -> Any:
        (number,) = flat(self.data)
        return number

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> "Iterator[Tensor]":
        return (self.like(row) for row in self.data)

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self.__int__()

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __repr__(self) -> str:
        return f"tensor({self.data})"

    def __hash__(self) -> int:
        return id(self)

    def like(self, data: Data, dtype: Dtype | None = None) -> "Tensor":
        return Tensor(data, dtype or self.dtype, self.device)

    def clone(self) -> "Tensor":
        return self.like(self.data)

    def copy_(self, other: "Tensor") -> "Tensor":
        self.data = each(self.dtype.of, other.data)
        return self

    def to(self, target: Any) -> "Tensor":
        return (
            self.like(self.data, target) if isinstance(target, Dtype) else Tensor(self.data, self.dtype, Device(target))
        )

    def long(self) -> "Tensor":
        return self.to(int64)

    def squeeze(self, dim: int = 0) -> "Tensor":
        return self[0] if dim in (0, -len(self.shape)) and len(self) == 1 else self.like(self.data)

    def unsqueeze(self, dim: int = 0) -> "Tensor":
        return self.like([self.data]) if dim == 0 else self.like([[row] for row in self.data])

    def flatten(self) -> "Tensor":
        return self.like(flat(self.data))

    # ---- choosing ----

    def argmax(self, dim: int = -1) -> "Tensor":
        return self.max(dim).indices

    def argmin(self, dim: int = -1) -> "Tensor":
        return self.like(each(lambda number: -number, self.data)).max(dim).indices

    def abs(self) -> "Tensor":
        return self.like(each(abs, self.data))

    def max(self, dim: int | None = None) -> Any:
        if len(self.shape) != 1 or dim not in (None, 0, -1):
            raise NotInThePage("a maximum of more than a row is not in the page; run this check in a terminal")
        best = max(self.data)
        return self.like(best) if dim is None else Best(self.like(best), self.like(self.data.index(best), int64))

    def sort(self, descending: bool = False) -> Best:
        order = sorted(range(len(self)), key=self.data.__getitem__, reverse=descending)
        return Best(self.like([self.data[i] for i in order]), self.like(order, int64))

    def argsort(self, descending: bool = False) -> "Tensor":
        return self.sort(descending).indices

    def topk(self, k: int) -> Best:
        values, indices = self.sort(descending=True)
        return Best(values[:k], indices[:k])

    def cumsum(self, dim: int = 0) -> "Tensor":
        return self.like(list(accumulate(self.data)))

    # ---- indexing ----

    def __getitem__(self, key: Any) -> "Tensor":
        return self.like(picked(self.data, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        given = value.data if isinstance(value, Tensor) else value
        if isinstance(key, tuple):
            rows, columns = (plain(part) for part in key)
            for row, column in zip(rows, columns, strict=True):
                self.data[row][column] = self.dtype.of(given)
            return
        places = range(len(self.data))[key] if isinstance(key, slice) else plain(key)
        for i, place in enumerate([places] if isinstance(places, int) else places):
            row = given if not isinstance(given, list) or isinstance(places, int) else given[i if len(given) > 1 else 0]
            self.data[place] = each(self.dtype.of, row) if isinstance(row, list) else filled_like(self.data[place], row)

    def index_select(self, dim: int, index: "Tensor") -> "Tensor":
        return self[index] if dim == 0 else self[:, index]

    # ---- arithmetic and comparison ----

    def of_both(self, other: Any, act: Callable[[Any, Any], Any], dtype: Dtype | None = None) -> "Tensor":
        return self.like(both(self.data, other.data if isinstance(other, Tensor) else other, act), dtype)

    def __add__(self, other: Any) -> "Tensor":
        return self.of_both(other, lambda a, b: a + b)

    def __radd__(self, other: Any) -> "Tensor":
        return self + other

    def __sub__(self, other: Any) -> "Tensor":
        return self.of_both(other, lambda a, b: a - b)

    def __mod__(self, other: Any) -> "Tensor":
        if other == 0:
            raise RuntimeError("ZeroDivisionError")  # as torch says it
        return self.of_both(other, lambda a, b: a % b)

    def __eq__(self, other: Any) -> Any:
        return self.of_both(other, lambda a, b: a == b, bool_)

    def __ne__(self, other: Any) -> Any:
        return self.of_both(other, lambda a, b: a != b, bool_)

    def __lt__(self, other: Any) -> "Tensor":
        return self.of_both(other, lambda a, b: a < b, bool_)

    def __gt__(self, other: Any) -> "Tensor":
        return self.of_both(other, lambda a, b: a > b, bool_)

    def all(self) -> "Tensor":
        return self.like(all(flat(self.data)), bool_)

    def sum(self) -> "Tensor":
        return self.like(sum(flat(self.data)), float32 if self.dtype.of is float else int64)

    def nonzero(self) -> "Tensor":
        return self.like([list(at) for at in product(*map(range, self.shape)) if picked(self.data, at)], int64)

    def any(self) -> "Tensor":
        return self.like(any(flat(self.data)), bool_)


class Generator:
    """A source of random numbers; not torch's numbers."""

    def manual_seed(self, seed: int) -> "Generator":
        self.chance = random.Random(seed)
        return self


def tensor(data: Any, dtype: Dtype | None = None, device: Any = "cpu") -> Tensor:
    numbers = each(
        plain, data.tolist() if isinstance(data, Tensor) else list(data) if isinstance(data, (tuple, range)) else data
    )
    kinds = set(map(type, flat(numbers)))
    guess = bool_ if kinds == {bool} else float32 if float in kinds or not kinds else int64
    return Tensor(numbers, dtype or guess, Device(device))


def arange(*bounds: Any, dtype: Dtype | None = None, device: Any = "cpu") -> Tensor:
    return Tensor(list(range(*map(int, bounds))), dtype or int64, Device(device))


def constant(number: float) -> Callable[..., Tensor]:
    def make(*shape: Any, dtype: Dtype | None = None, device: Any = "cpu") -> Tensor:
        return Tensor(nested(sizes_of(shape), lambda: number), dtype or float32, Device(device))

    return make


def full(shape: Any, number: Any, dtype: Dtype | None = None, device: Any = "cpu") -> Tensor:
    guess = int64 if isinstance(number, int) else float32
    return constant(number)(shape, dtype=dtype or guess, device=device)


def randn(*shape: Any, generator: Generator) -> Tensor:
    return Tensor(nested(sizes_of(shape), lambda: generator.chance.gauss(0, 1)), float32)


def equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.data == other.data


SMALL: dict[str, Any] = {
    "Tensor": Tensor, "Generator": Generator, "Size": Size, "device": Device,
    "tensor": tensor, "as_tensor": tensor, "arange": arange, "randn": randn,
    "zeros": constant(0), "ones": constant(1), "empty": constant(0), "full": full, "equal": equal,
    "empty_like": lambda like: like.clone(), "zeros_like": lambda like: like.like(filled_like(like.data, 0)),
    "argmax": lambda given, dim=-1: given.argmax(dim), "max": lambda given, dim=None: given.max(dim),
    "int64": int64, "long": int64, "int32": int32, "bool": bool_, "float32": float32, "float64": float64,
}  # fmt: skip
