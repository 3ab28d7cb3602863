"""Course machinery. Where a small tensor's numbers lie: bytes that views share, dtypes, shapes and strides.

Numbers are kept as bytes in their dtype, so a float32 is rounded when it is written, as in torch, and the same bytes
can be read as another dtype.
"""

import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

BOOL, WHOLE, FLOAT = range(3)  # kinds of dtypes, in the order of promotion


class NotInThePage(RuntimeError, AttributeError):
    """Code needs an operation that pages do not have. Also an AttributeError, so that hasattr returns False."""


def missing(what: str) -> NotInThePage:
    return NotInThePage(f"{what} is not in the page, which has few tensor operations; run this check in a terminal")


class Dtype(NamedTuple):
    name: str
    itemsize: int
    code: str  # of `struct`; "" for bfloat16, which it does not have
    kind: int

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    @property
    def is_floating_point(self) -> bool:
        return self.kind == FLOAT

    def fit(self, number: Any) -> Any:
        """Convert a number as torch's casts do: floats are cut off, whole numbers wrap around."""
        if self.kind == FLOAT:
            return float(number)
        if self.kind == BOOL:
            return bool(number)
        bits = 8 * self.itemsize
        least = 0 if self.code.isupper() else -(2 ** (bits - 1))
        whole = int(number) if math.isfinite(number) else least
        return (whole - least) % 2**bits + least


bool_ = Dtype("bool", 1, "?", BOOL)
uint8, int8 = Dtype("uint8", 1, "B", WHOLE), Dtype("int8", 1, "b", WHOLE)
int16, int32, int64 = Dtype("int16", 2, "h", WHOLE), Dtype("int32", 4, "i", WHOLE), Dtype("int64", 8, "q", WHOLE)
float16, bfloat16 = Dtype("float16", 2, "e", FLOAT), Dtype("bfloat16", 2, "", FLOAT)
float32, float64 = Dtype("float32", 4, "f", FLOAT), Dtype("float64", 8, "d", FLOAT)
DTYPES = (bool_, uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64)
MIXED = {frozenset((uint8, int8)): int16, frozenset((float16, bfloat16)): float32}


def wider(one: Dtype, other: Dtype) -> Dtype:
    """Return the dtype that holds the results of two."""
    return MIXED.get(frozenset((one, other))) or max(one, other, key=DTYPES.index)


class Halves:
    """Bytes read and written as float16 or bfloat16, by way of float32."""

    def __init__(self, raw: memoryview, code: str) -> None:
        self.bits, self.code = raw.cast("H"), code

    def __getitem__(self, place: int) -> float:
        bits = self.bits[place]
        if self.code:
            return struct.unpack("e", struct.pack("H", bits))[0]
        return struct.unpack("f", struct.pack("I", bits << 16))[0]

    def __setitem__(self, place: int, number: float) -> None:
        self.bits[place] = half_bits(number, self.code)


def half_bits(number: float, code: str) -> int:
    (single,) = array("f", (number,))
    if code:
        try:
            return struct.unpack("H", struct.pack("e", single))[0]
        except OverflowError:
            return struct.unpack("H", struct.pack("e", math.copysign(math.inf, single)))[0]
    bits = struct.unpack("I", struct.pack("f", single))[0]
    if single != single:
        return 0x7FC0
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to the nearest; of two equally near ones the even one


def cells_of(raw: memoryview, dtype: Dtype) -> Any:
    """Return bytes as numbers that can be read and written by place."""
    whole = raw[: len(raw) - len(raw) % dtype.itemsize]
    return Halves(whole, dtype.code) if dtype in (float16, bfloat16) else whole.cast(cast(Any, dtype.code))


def packed(numbers: Sequence[Any], dtype: Dtype) -> memoryview:
    """Return numbers as new bytes of this dtype."""
    if dtype in (float16, bfloat16):
        data: Any = array("H", (half_bits(number, dtype.code) for number in numbers))
    elif dtype is bool_:
        data = bytes(map(bool, numbers))
    else:
        try:
            data = array(dtype.code, numbers)
        except (TypeError, OverflowError):
            data = array(dtype.code, map(dtype.fit, numbers))
    return memoryview(Memory(bytes(data) or bytes(8)))


class Memory(bytearray):
    """Bytes that a weak reference can refer to."""


class Size(tuple):
    """A tensor's shape."""

    def numel(self) -> int:
        return math.prod(self)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return Size(found) if isinstance(key, slice) else found

    def __repr__(self) -> str:
        return f"torch.Size({list(self)})"


def steps_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(accumulate((max(1, size) for size in shape[:0:-1]), int.__mul__, initial=1))[::-1] if shape else ()


def is_packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the numbers lie side by side in the order of their indices."""
    return all(a == b or size == 1 for a, b, size in zip(strides, steps_of(shape), shape, strict=True))


def places(shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Sequence[int]:
    """Return the places of all elements, in the order of their indices."""
    if is_packed(shape, strides):
        return range(offset, offset + math.prod(shape))
    found = [offset]
    for size, stride in zip(shape, strides, strict=True):
        steps = [i * stride for i in range(size)]
        found = [place + step for place in found for step in steps]
    return found


def together(*shapes: Sequence[int]) -> Size:
    """Return the shape to which these broadcast."""
    longest = max(map(len, shapes))
    sizes = []
    for column in zip(*((1,) * (longest - len(shape)) + tuple(shape) for shape in shapes), strict=True):
        several = set(column) - {1}
        if len(several) > 1:
            raise RuntimeError(f"shapes {', '.join(str(tuple(shape)) for shape in shapes)} do not broadcast")
        sizes.append(several.pop() if several else 1)
    return Size(sizes)


def at(dim: int, dims: int) -> int:
    """Return a dimension counted from the front."""
    if not -max(1, dims) <= dim < max(1, dims):
        raise IndexError(f"Dimension out of range: {dim} of a tensor with {dims} dimensions")
    return dim % max(1, dims)


def sizes_of(shape: Iterable[Any]) -> tuple[Any, ...]:
    """Return sizes that were given one by one, or in a list."""
    given = tuple(shape)
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def split_strides(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides with which the same memory has the shape `new`; None if it has to be copied."""
    if is_packed(shape, strides):
        return steps_of(new)
    runs: list[list[int]] = []  # sizes and strides of neighbouring dimensions that lie like one
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    found: list[int] = []
    left, step = runs.pop() if runs else (1, 1)
    for size in reversed(new):
        if left == 1 and size != 1 and runs:
            left, step = runs.pop()
        if left % size:
            return None
        found.append(step)
        left, step = left // size, step * size
    return tuple(reversed(found)) if left == 1 and not runs else None
