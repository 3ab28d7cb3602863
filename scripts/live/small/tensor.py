"""Course machinery. A small tensor: its numbers, Python's protocols, copies, and how operations are found."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from scripts.live.small.indexing import OPERATIONS, Indexed
from scripts.live.small.show import shown
from scripts.live.small.strided import (
    DTYPES,
    WHOLE,
    Dtype,
    Size,
    bfloat16,
    bool_,
    cells_of,
    float16,
    float32,
    float64,
    int32,
    int64,
    is_packed,
    missing,
    packed,
    places,
    steps_of,
)

CASTS = {"float": float32, "double": float64, "half": float16, "long": int64, "int": int32, "bool": bool_} | {
    dtype.name: dtype for dtype in DTYPES if dtype is bfloat16
}


def operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function one of torch's, and its name with `_` the same in place."""
    OPERATIONS[function.__name__.rstrip("_")] = function
    return function


class Device(str):
    """A device's name, as a device."""

    @property
    def type(self) -> str:
        return self.partition(":")[0]


CPU = Device("cpu")


class Storage(NamedTuple):
    """A tensor's memory."""

    raw: memoryview

    def nbytes(self) -> int:
        return len(self.raw)

    def data_ptr(self) -> int:
        return id(self.raw.obj)


class Tensor(Indexed):
    """Numbers of one dtype in shared bytes."""

    if TYPE_CHECKING:  # set by `elementwise` and `products`
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = cast(Any, None)
        __gt__ = __neg__ = __invert__ = cast(Any, None)

    requires_grad, is_cuda, is_mkldnn, grad = False, False, False, None

    def __init__(
        self,
        raw: memoryview,
        dtype: Dtype,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        offset: int = 0,
        device: Device = CPU,
    ) -> None:
        self.raw, self.dtype, self.device, self.shape = raw, dtype, device, Size(shape)
        self.strides, self.offset = steps_of(shape) if strides is None else tuple(strides), offset
        self.cells = cells_of(raw, dtype)

    def __getattr__(self, name: str) -> Any:
        if name in OPERATIONS:
            return partial(OPERATIONS[name], self)
        if name in CASTS:
            return partial(self.to, CASTS[name])
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_") and name[:-1] in OPERATIONS:
            return lambda *given, **more: self.copy_(OPERATIONS[name[:-1]](self, *given, **more))
        raise missing(f"Tensor.{name}")

    # ---- making others ----

    def made(self, numbers: Sequence[Any], shape: Sequence[int], dtype: Dtype | None = None) -> "Tensor":
        """Return a new tensor on the same device."""
        return Tensor(packed(numbers, dtype or self.dtype), dtype or self.dtype, shape, device=self.device)

    @property
    def values(self) -> list[Any]:
        """All numbers, in the order of their indices."""
        where = self.places
        if isinstance(where, range) and isinstance(self.cells, memoryview):
            return self.cells[where.start : where.stop].tolist()
        return [self.cells[place] for place in where]

    @property
    def places(self) -> Sequence[int]:
        return places(self.shape, self.strides, self.offset)

    def fill_at(self, where: Sequence[int], numbers: Sequence[Any], dtype: Dtype) -> None:
        """Write numbers, which come as `dtype`."""
        fit = None if dtype is self.dtype or self.dtype.kind > WHOLE else self.dtype.fit
        for place, number in zip(where, numbers, strict=True):
            self.cells[place] = fit(number) if fit else number

    # ---- Python's protocols ----

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def is_meta(self) -> bool:
        return self.device.type == "meta"

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def storage_offset(self) -> int:
        return self.offset

    def untyped_storage(self) -> Storage:
        return Storage(self.raw)

    def data_ptr(self) -> int:
        return id(self.raw.obj) + self.offset * self.dtype.itemsize

    @property
    def data(self) -> "Tensor":
        return self

    def tolist(self) -> Any:
        self.need_numbers()
        numbers: Any = self.values
        for dim in range(self.dim() - 1, 0, -1):
            size, count = self.shape[dim], self.shape[:dim].numel()
            numbers = [numbers[i * size : (i + 1) * size] for i in range(count)]
        return numbers if self.shape else numbers[0]

    def need_numbers(self) -> None:
        if self.is_meta:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    def item(self) -> Any:
        self.need_numbers()
        if self.numel() != 1:
            raise RuntimeError(f"a Tensor with {self.numel()} elements cannot be converted to Scalar")
        return self.values[0]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> "Iterator[Tensor]":
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        return (self[i] for i in range(len(self)))

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.kind > WHOLE:
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return self.__int__()

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
        return bool(self.item())

    def __contains__(self, number: Any) -> bool:
        return number in self.values

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.shape else format(repr(self), spec)

    def __repr__(self) -> str:
        return shown(self.tolist(), self.values, self.dtype)

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: Any) -> "Tensor":
        return self.clone()

    # ---- copies ----

    def clone(self, memory_format: Any = None) -> "Tensor":
        return self.made(self.values, self.shape)

    def is_contiguous(self) -> bool:
        return is_packed(self.shape, self.strides)

    def contiguous(self) -> "Tensor":
        return self if self.is_contiguous() else self.clone()

    def to(self, *targets: Any, dtype: Any = None, device: Any = None, **rest: Any) -> "Tensor":
        for target in targets:
            if isinstance(target, Dtype):
                dtype = target
            elif isinstance(target, Tensor):
                dtype, device = target.dtype, target.device
            elif isinstance(target, str):
                device = target
        if self.is_meta and Device(device or "meta").type != "meta":
            self.need_numbers()
        place = self.device if device is None else Device(device)
        if (dtype or self.dtype) is self.dtype and place == self.device and not rest.get("copy"):
            return self
        found = self.made(self.values, self.shape, dtype or self.dtype)
        found.device = place
        return found

    def cpu(self) -> "Tensor":
        return self.to(CPU)

    def copy_(self, other: "Tensor", non_blocking: bool = False) -> "Tensor":
        source = other.expand(self.shape)
        if self.overlaps(source):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
                "memory location. Please clone() the tensor before performing the operation."
            )
        numbers = source.values
        self.fill_at(self.places, numbers, other.dtype)
        return self

    def overlaps(self, other: "Tensor") -> bool:
        """Whether two tensors without gaps share some of their memory, and not place by place."""
        if self.raw.obj is not other.raw.obj or self.numel() < 2:
            return False
        mine, theirs = ([place * one.itemsize for place in one.places] for one in (self, other))
        dense = all(len({*found}) == one.numel() == (max(found) - min(found)) // one.itemsize + 1
                    for found, one in ((mine, self), (theirs, other)))  # fmt: skip
        return dense and mine != theirs and bool({*mine} & {*theirs})

    def requires_grad_(self, requires_grad: bool = True) -> "Tensor":
        return self

    def detach(self) -> "Tensor":
        return self.seen(self.shape, self.strides)
