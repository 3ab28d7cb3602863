"""Course machinery. Operations of small tensors by index: what is where, gathering, scattering, counting."""

from typing import Any

from scripts.live.small.along import mean
from scripts.live.small.elementwise import both
from scripts.live.small.strided import at, int64, missing
from scripts.live.small.tensor import OPERATIONS, Tensor, operation


@operation
def nonzero(one: Tensor, as_tuple: bool = False) -> Any:
    found = []
    steps = [one.shape[dim + 1 :].numel() for dim in range(one.dim())]
    for place, number in enumerate(one.values):
        if number:
            found += [place // step % size for step, size in zip(steps, one.shape, strict=True)]
    table = one.made(found, (len(found) // one.dim() if one.shape else int(bool(one)), one.dim()), int64)
    return tuple(table.T) if as_tuple else table


@operation
def index_select(one: Tensor, dim: int, index: Tensor) -> Tensor:
    return one[(slice(None),) * at(dim, one.dim()) + (index,)]


def grid(one: Tensor, dim: int, index: Tensor) -> tuple[Tensor, ...]:
    """Return the index of each element of `index` in `one`, with its own number along `dim`."""
    dim, parts = at(dim, one.dim()), []
    for each, size in enumerate(index.shape):
        shape = [1] * index.dim()
        shape[each] = size
        parts.append(index if each == dim else index.made(range(size), shape, int64))
    return tuple(parts)


@operation
def gather(one: Tensor, dim: int, index: Tensor) -> Tensor:
    if index.dim() != one.dim():
        raise RuntimeError("Index tensor must have the same number of dimensions as input tensor")
    return one[grid(one, dim, index)]


@operation
def scatter(one: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None) -> Tensor:
    found, given = one.clone(), value if src is None else src
    found[grid(one, dim, index)] = given[tuple(map(slice, index.shape))] if isinstance(given, Tensor) else given
    return found


@operation
def index_fill(one: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    found = one.clone()
    found[(slice(None),) * at(dim, one.dim()) + (index,)] = value
    return found


@operation
def index_copy(one: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    found = one.clone()
    found[(slice(None),) * at(dim, one.dim()) + (index,)] = source
    return found


@operation
def index_add(one: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if at(dim, one.dim()):
        raise missing("index_add along a later dimension")
    found = one.clone()
    for place, row in zip(index.tolist(), source, strict=True):
        found[place] += row
    return found


@operation
def scatter_add(one: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    if one.dim() != 1:
        raise missing("scatter_add in more than one dimension")
    return index_add(one, 0, index, src[: len(index)])


@operation
def bincount(one: Tensor, weights: Any = None, minlength: int = 0) -> Tensor:
    numbers = one.values
    if weights is not None:
        raise missing("bincount with weights")
    size = max(minlength, max(numbers, default=-1) + 1)
    return one.made([numbers.count(i) for i in range(size)], (size,), int64)


@operation
def histc(one: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    counts = [0] * bins
    for number in one.values:
        if min <= number <= max:
            counts[int((number - min) / (max - min) * bins) if number < max else -1] += 1
    return one.made(counts, (bins,))


@operation
def corrcoef(one: Tensor) -> Tensor:
    far = both(lambda a, b: a - b, one, mean(one, 1, keepdim=True))
    products = far @ far.T
    sizes = OPERATIONS["sqrt"](products[range(len(one)), range(len(one))])
    return products / (sizes[:, None] * sizes)


@operation
def argwhere(one: Tensor) -> Tensor:
    return nonzero(one)
