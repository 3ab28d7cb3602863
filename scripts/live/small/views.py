"""Course machinery. Views of small tensors: other shapes and strides over the same bytes."""

from collections.abc import Callable, Sequence
from typing import Any

from scripts.live.small.strided import Dtype, Size, at, sizes_of, split_strides


class Views:
    """What a tensor can be seen as. Writing through a view writes into the tensor."""

    shape: Size
    strides: tuple[int, ...]
    offset: int
    dtype: Dtype
    raw: memoryview
    device: Any
    cells: Any
    made: Callable[..., Any]  # by Tensor, as `clone`
    clone: Callable[..., Any]

    def __init__(self, raw: memoryview, dtype: Dtype, shape: Any, strides: Any, offset: int, device: Any) -> None:
        """Defined by Tensor."""

    def seen(self, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> Any:
        """Return a view."""
        return type(self)(self.raw, self.dtype, shape, strides, self.offset if offset is None else offset, self.device)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def view(self, *shape: Any) -> Any:
        if len(shape) == 1 and isinstance(shape[0], Dtype):
            return self.read_as(shape[0])
        new = self.filled_in(shape)
        strides = split_strides(self.shape, self.strides, new)
        if strides is None:
            raise RuntimeError("view size is not compatible with input tensor's size and stride. Use .reshape(...)")
        return self.seen(new, strides)

    def filled_in(self, shape: Sequence[Any]) -> tuple[int, ...]:
        """Return a shape for all elements, with the size that is given as -1."""
        sizes, count = [int(size) for size in sizes_of(shape)], self.numel()
        if -1 in sizes:
            known = -Size(sizes).numel()
            sizes[sizes.index(-1)] = count // known if known else 0
        if Size(sizes).numel() != count:
            raise RuntimeError(f"shape '{list(sizes_of(shape))}' is invalid for input of size {count}")
        return tuple(sizes)

    def read_as(self, dtype: Dtype) -> Any:
        """Return the same bytes as another dtype."""
        old, new = self.dtype.itemsize, dtype.itemsize
        if old == new:
            return type(self)(self.raw, dtype, self.shape, self.strides, self.offset, self.device)
        if not self.shape or (self.strides[-1] != 1 and self.shape[-1] != 1):
            raise RuntimeError("self.stride(-1) must be 1 to view one dtype as another of a different size")
        bytes_ = [*(stride * old for stride in self.strides[:-1]), self.offset * old, self.shape[-1] * old]
        if any(size % new for size in bytes_):
            raise RuntimeError(f"sizes, strides and offset must be divisible by {new} bytes to view as {dtype}")
        *strides, offset, last = (size // new for size in bytes_)
        return type(self)(self.raw, dtype, (*self.shape[:-1], last), (*strides, 1), offset, self.device)

    def view_as(self, other: Any) -> Any:
        return self.view(other.shape)

    def reshape(self, *shape: Any) -> Any:
        new = self.filled_in(shape)
        return self.view(new) if split_strides(self.shape, self.strides, new) else self.clone().view(new)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if not self.shape:
            return self.view(1)
        first, last = at(start_dim, self.dim()), at(end_dim, self.dim())
        middle = Size(self.shape[first : last + 1]).numel()
        return self.reshape(*self.shape[:first], middle, *self.shape[last + 1 :])

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Any:
        dim = at(dim, self.dim())
        known = -Size(sizes).numel()
        sizes = [self.shape[dim] // known if size == -1 else size for size in sizes]
        return self.view(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def permute(self, *dims: Any) -> Any:
        order = [at(dim, self.dim()) for dim in sizes_of(dims)]
        return self.seen([self.shape[dim] for dim in order], [self.strides[dim] for dim in order])

    def transpose(self, one: int, other: int) -> Any:
        order = list(range(self.dim()))
        one, other = at(one, self.dim()), at(other, self.dim())
        order[one], order[other] = order[other], order[one]
        return self.permute(order)

    def t(self) -> Any:
        return self.permute(*reversed(range(self.dim())))

    @property
    def T(self) -> Any:
        return self.t()

    @property
    def mT(self) -> Any:
        return self.transpose(-2, -1)

    def squeeze(self, dim: int | None = None) -> Any:
        chosen = range(self.dim()) if dim is None else [at(dim, self.dim())]
        kept = [i for i in range(self.dim()) if i not in chosen or self.shape[i] != 1]
        return self.permute(kept)

    def unsqueeze(self, dim: int) -> Any:
        dim = at(dim, self.dim() + 1)
        shape, strides = list(self.shape), list(self.strides)
        strides.insert(dim, strides[dim] * shape[dim] if dim < len(shape) else 1)
        shape.insert(dim, 1)
        return self.seen(shape, strides)

    def expand(self, *shape: Any) -> Any:
        new = list(sizes_of(shape))
        old = (1,) * (len(new) - self.dim()) + self.shape
        strides = (0,) * (len(new) - self.dim()) + self.strides
        new = [have if want == -1 else want for have, want in zip(old, new, strict=len(old) == len(new))]
        if len(old) > len(new) or any(have not in (1, want) for have, want in zip(old, new, strict=True)):
            raise RuntimeError(f"a tensor of shape {tuple(self.shape)} cannot be expanded to {tuple(new)}")
        return self.seen(new, [0 if have != want else step for have, want, step in zip(old, new, strides, strict=True)])

    def expand_as(self, other: Any) -> Any:
        return self.expand(other.shape)

    def narrow(self, dim: int, start: int, length: int) -> Any:
        dim = at(dim, self.dim())
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self.seen(shape, self.strides, self.offset + start * self.strides[dim])

    def select(self, dim: int, index: int) -> Any:
        dim = at(dim, self.dim())
        size = self.shape[dim]
        if not -size <= index < size:
            raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")
        start = self.offset + index % size * self.strides[dim]
        return self.seen(self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :], start)
