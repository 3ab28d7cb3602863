"""Course machinery. Indices of small tensors: numbers, slices, masks, and tensors of places."""

from collections.abc import Callable, Sequence
from typing import Any

from scripts.live.small.strided import BOOL, WHOLE, Size, int64, missing, places, together
from scripts.live.small.views import Views

OPERATIONS: dict[str, Callable[..., Any]] = {}  # by name, the tensor first; `torch.name` and `Tensor.name`


class Indexed(Views):
    """A tensor that can be indexed, and written by index."""

    def __getitem__(self, key: Any) -> Any:
        view, indices = self.parted(key)
        if not indices:
            return view
        where, shape = view.spots(indices)
        return self.made([view.cells[place] for place in where], shape)

    def __setitem__(self, key: Any, value: Any) -> None:
        view, indices = self.parted(key)
        where, shape = view.spots(indices) if indices else (view.places, view.shape)
        if not isinstance(value, Views):
            view.fill_at(where, [self.dtype.fit(value)] * len(where), self.dtype)
            return
        spare = value.dim() - len(shape)
        if spare > 0 and set(value.shape[:spare]) == {1}:
            value = value.view(value.shape[spare:])
        view.fill_at(where, value.expand(shape).values, value.dtype)

    def index_put_(self, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
        if accumulate:
            raise missing("index_put_ that accumulates")
        self[tuple(indices)] = values
        return self

    def parted(self, key: Any) -> tuple[Any, dict[int, Any]]:
        """Return what an index shows as a view, and the tensors that choose in dimensions of the view."""
        keys = [index(part) for part in (key if isinstance(key, tuple) else (key,))]
        uses = [part.dim() if isinstance(part, Views) and part.dtype.kind == BOOL else 1 for part in keys]
        taken = sum(use for part, use in zip(keys, uses, strict=True) if part is not None and part is not ...)
        if taken > self.dim():
            raise IndexError("too many indices for tensor of dimension " + str(self.dim()))
        if ... not in [part for part in keys if not isinstance(part, Views)]:
            keys.append(...)
        view, dim, indices = self, 0, {}
        for part in keys:
            if part is ...:
                dim += self.dim() - taken
            elif part is None:
                view, dim = view.unsqueeze(dim), dim + 1
            elif isinstance(part, slice):
                view, dim = view.sliced(dim, part), dim + 1
            elif isinstance(part, int):
                view = view.select(dim, part)
            else:
                for one in chosen_by(part, view.shape[dim : dim + part.dim()]):
                    indices[dim] = one
                    dim += 1
        return view, indices

    def sliced(self, dim: int, part: slice) -> Any:
        begin, end, step = part.indices(self.shape[dim])
        if step < 1:
            raise ValueError("step must be greater than zero")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = len(range(begin, end, step)), strides[dim] * step
        return self.seen(shape, strides, self.offset + begin * self.strides[dim])

    def spots(self, indices: dict[int, Any]) -> tuple[list[int], Size]:
        """Return the places that index tensors choose, and the shape of the result."""
        shape = together(*(one.shape for one in indices.values()))
        steps = [0] * shape.numel()
        for dim, one in indices.items():
            size, stride = self.shape[dim], self.strides[dim]
            for number in one.values:
                if not -size <= number < size:
                    raise IndexError(f"index {number} is out of bounds for dimension {dim} with size {size}")
            numbers = one.expand(shape).values
            steps = [step + number % size * stride for step, number in zip(steps, numbers, strict=True)]
        dims = list(indices)
        side_by_side = dims == list(range(dims[0], dims[-1] + 1))
        first = range(dims[0]) if side_by_side else range(0)
        last = [dim for dim in range(self.dim()) if dim not in indices and dim not in first]
        heads, tails = (
            ([self.shape[dim] for dim in group], [self.strides[dim] for dim in group]) for group in (first, last)
        )
        ends = places(*tails)
        where = [head + step + end for head in places(*heads, self.offset) for step in steps for end in ends]
        return where, Size((*heads[0], *shape, *tails[0]))


def index(part: Any) -> Any:
    """Return one part of an index: a number, a slice, None, ..., or a tensor."""
    if isinstance(part, (list, range, tuple)):
        return OPERATIONS["tensor"](part, dtype=None if len(part) else int64)
    if isinstance(part, bool):
        return OPERATIONS["tensor"]([part])
    if isinstance(part, Views) and part.dtype.kind > WHOLE:
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    if isinstance(part, slice):
        return slice(*(None if end is None else int(end) for end in (part.start, part.stop, part.step)))
    if isinstance(part, Views) or part is None or part is ...:
        return part
    return part.__index__()


def chosen_by(part: Any, sizes: Sequence[int]) -> list[Any]:
    """Return an index tensor for each dimension that `part` indexes: itself, or where a mask is True."""
    if part.dtype.kind != BOOL:
        return [part]
    if part.shape != tuple(sizes):
        raise IndexError(f"The shape of the mask {list(part.shape)} does not match {list(sizes)} of the tensor")
    return list(part.nonzero().T)
