"""Course machinery. Operations of small tensors along a dimension: sums, extremes, order, running sums, places."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from scripts.live.small.strided import FLOAT, Dtype, Size, at, bool_, int32, int64, missing
from scripts.live.small.tensor import OPERATIONS, Tensor, operation


class Best(NamedTuple):
    values: Tensor
    indices: Tensor


class Range(NamedTuple):
    min: Tensor
    max: Tensor


Dims = int | Sequence[int] | None


def rows_of(one: Tensor, dims: Dims) -> tuple[list[list[Any]], Tensor, tuple[int, ...]]:
    """Return the numbers along some dimensions, a list for each place in the others; the others; and these."""
    chosen = range(one.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    last = tuple(sorted(at(dim, one.dim()) for dim in chosen)) if one.shape else ()
    first = [dim for dim in range(one.dim()) if dim not in last]
    moved = one.permute(*first, *last) if one.shape else one
    length, numbers = Size(one.shape[dim] for dim in last).numel(), moved.values
    others = Size(one.shape[dim] for dim in first)
    rows = [numbers[i * length : (i + 1) * length] for i in range(others.numel())]
    return rows, one.seen(others, (0,) * len(others)), last


def reduced(
    one: Tensor, act: Callable[[list[Any]], Any], dims: Dims, keepdim: bool = False, dtype: Dtype | None = None
) -> Tensor:
    rows, others, last = rows_of(one, dims)
    found = one.made([act(row) for row in rows], others.shape, dtype)
    return found.view([1 if dim in last else size for dim, size in enumerate(one.shape)]) if keepdim else found


def total(row: list[Any]) -> Any:
    finite = not row or isinstance(row[0], int) or all(map(math.isfinite, row))
    return math.fsum(row) if finite and row and isinstance(row[0], float) else sum(row)


@operation
def sum_(one: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Dtype | None = None) -> Tensor:
    return reduced(one, total, dim, keepdim, dtype or (one.dtype if one.dtype.kind == FLOAT else int64))


@operation
def mean(one: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return reduced(one, lambda row: total(row) / len(row) if row else math.nan, dim, keepdim)


@operation
def prod(one: Tensor) -> Tensor:
    return reduced(one, math.prod, None, dtype=one.dtype if one.dtype.kind == FLOAT else int64)


def vector_norm(one: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    if ord == math.inf:
        return OPERATIONS["amax"](OPERATIONS["abs"](one), dim, keepdim)
    if ord != 2:
        raise missing(f"a norm of order {ord}")
    return reduced(one, lambda row: math.sqrt(total([x * x for x in row])), dim, keepdim)


@operation
def norm(one: Tensor, p: float = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return vector_norm(one, p, dim, keepdim)


@operation
def all_(one: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return reduced(one, all, dim, keepdim, bool_)


@operation
def any_(one: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return reduced(one, any, dim, keepdim, bool_)


@operation
def count_nonzero(one: Tensor, dim: Dims = None) -> Tensor:
    return reduced(one, lambda row: len(row) - row.count(0), dim, dtype=int64)


# ---- extremes ----


def place_of(row: list[Any], best: Callable[..., Any]) -> int:
    """Return where the first NaN is, or the first extreme number."""
    if not row:
        raise RuntimeError("max(): Expected reduction dim to be specified for input.numel() == 0.")
    odd = next((i for i, number in enumerate(row) if number != number), None)
    return row.index(best(row)) if odd is None else odd


def extreme(
    best: Callable[..., Any], elementwise: str
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the three operations of an extreme: `max`, `amax` and `argmax`."""

    def arg(one: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return reduced(one, lambda row: place_of(row, best), dim, keepdim, int64)

    def of(one: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        return reduced(one, lambda row: row[place_of(row, best)], None if dim == () else dim, keepdim)

    def either(one: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, Tensor):
            return OPERATIONS[elementwise](one, dim)
        return of(one) if dim is None else Best(of(one, dim, keepdim), arg(one, dim, keepdim))

    return either, of, arg


OPERATIONS["max"], OPERATIONS["amax"], OPERATIONS["argmax"] = extreme(max, "maximum")
OPERATIONS["min"], OPERATIONS["amin"], OPERATIONS["argmin"] = extreme(min, "minimum")


@operation
def aminmax(one: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Range:
    return Range(OPERATIONS["amin"](one, dim, keepdim), OPERATIONS["amax"](one, dim, keepdim))


# ---- order ----


def along(one: Tensor, dim: int, act: Callable[[list[Any]], Sequence[Any]], dtype: Dtype | None = None) -> Tensor:
    """Replace each row along a dimension by another."""
    if not one.shape:
        return one.made(act(one.values), (), dtype)
    moved = one.transpose(dim, -1)
    rows, _, _ = rows_of(moved, -1)
    found = [act(row) for row in rows]
    shape = (*moved.shape[:-1], len(found[0]) if found else moved.shape[-1])
    return one.made([number for row in found for number in row], shape, dtype).transpose(dim, -1)


def ordered(row: list[Any], descending: bool) -> list[int]:
    """Return the places of a row's numbers in order; NaN is the largest, and equal ones stay in order."""
    return sorted(range(len(row)), key=lambda i: (row[i] != row[i], row[i]), reverse=descending)


@operation
def argsort(one: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
    return along(one, dim, lambda row: ordered(row, descending), int64).contiguous()


@operation
def sort(one: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Best:
    order = argsort(one, dim, descending)
    return Best(OPERATIONS["gather"](one, dim, order) if one.shape else one.clone(), order)


@operation
def topk(one: Tensor, k: int, dim: int = -1) -> Best:
    if k > (one.shape[dim] if one.shape else 1):
        raise RuntimeError("selected index k out of range")
    return Best(*(found.narrow(dim, 0, k).contiguous() for found in sort(one, dim, descending=True)))


@operation
def unique(one: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    numbers = one.values
    kinds = list(dict.fromkeys(one.flatten().sort().values.tolist()))
    found = [one.made(kinds, (len(kinds),))]
    if return_inverse:
        found.append(one.made([kinds.index(number) for number in numbers], one.shape, int64))
    if return_counts:
        found.append(one.made([numbers.count(number) for number in kinds], (len(kinds),), int64))
    return found[0] if len(found) == 1 else tuple(found)


@operation
def unique_consecutive(one: Tensor, return_inverse: bool = False, return_counts: bool = False) -> Any:
    runs = [(number, len(list(same))) for number, same in groupby(one.values)]
    if return_inverse:
        raise missing("unique_consecutive with return_inverse")
    numbers = one.made([number for number, _ in runs], (len(runs),))
    return (numbers, one.made([count for _, count in runs], (len(runs),), int64)) if return_counts else numbers


@operation
def flip(one: Tensor, *dims: Any) -> Tensor:
    for dim in dims[0] if isinstance(dims[0], (tuple, list)) else dims:
        one = along(one, dim, lambda row: row[::-1])
    return one.contiguous()


@operation
def cumsum(one: Tensor, dim: int = 0, dtype: Dtype | None = None, out: Tensor | None = None) -> Tensor:
    kind = dtype or (one.dtype if one.dtype.kind == FLOAT else int64)
    found = along(one.to(kind), dim, lambda row: list(accumulate(row)))
    return found.contiguous() if out is None else out.copy_(found)


@operation
def cummax(one: Tensor, dim: int) -> Best:
    def last_best(row: list[Any]) -> list[int]:
        return list(accumulate(range(len(row)), lambda best, i: best if row[i] < row[best] else i))

    order = along(one, dim, last_best, int64).contiguous()
    return Best(OPERATIONS["gather"](one, dim, order), order)


@operation
def cumprod(one: Tensor, dim: int) -> Tensor:
    return along(one, dim, lambda row: list(accumulate(row, lambda a, b: a * b))).contiguous()


@operation
def searchsorted(
    one: Tensor, values: Any, *, right: bool = False, out_int32: bool = False, side: str = "left"
) -> Tensor:
    find = bisect_right if right or side == "right" else bisect_left
    dtype = int32 if out_int32 else int64
    given = values if isinstance(values, Tensor) else one.made([values], ())
    rows = rows_of(one, -1)[0]
    if one.dim() == 1:
        return given.made([find(rows[0], number) for number in given.values], given.shape, dtype)
    wanted = rows_of(given, -1)[0]
    if given.shape[:-1] != one.shape[:-1]:
        raise RuntimeError("searchsorted(): the first N-1 dimensions of boundaries tensor and input value must match")
    found = [find(row, number) for row, numbers in zip(rows, wanted, strict=True) for number in numbers]
    return given.made(found, given.shape, dtype)


@operation
def bucketize(one: Tensor, boundaries: Tensor, *, right: bool = False) -> Tensor:
    return searchsorted(boundaries, one, right=right)
