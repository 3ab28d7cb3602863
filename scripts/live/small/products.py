"""Course machinery. Small tensors joined, repeated, masked and multiplied."""

import math
import operator
from collections.abc import Sequence
from itertools import product
from typing import Any

from scripts.live.small.elementwise import common, masked_fill
from scripts.live.small.probabilities import softmax
from scripts.live.small.strided import FLOAT, Size, at, bool_, int64, missing, together
from scripts.live.small.tensor import OPERATIONS, Tensor, operation

# ---- joining and repeating ----


@operation
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = [one for one in tensors if one.shape != (0,)] or list(tensors[:1])
    dim, dtype = at(dim, parts[0].dim()), common(*tensors)
    rest = {one.shape[:dim] + one.shape[dim + 1 :] for one in parts}
    if len(rest) > 1:
        raise RuntimeError(f"Sizes of tensors must match except in dimension {dim}: {[tuple(x.shape) for x in parts]}")
    size = sum(one.shape[dim] for one in parts)
    before, numbers = parts[0].shape[:dim].numel(), []
    columns = [(one.values, one.shape[dim:].numel()) for one in parts]
    for i in range(before):
        for values, length in columns:
            numbers += values[i * length : (i + 1) * length]
    return parts[0].made(numbers, (*parts[0].shape[:dim], size, *parts[0].shape[dim + 1 :]), dtype)


@operation
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return cat([one.unsqueeze(dim) for one in tensors], dim)


@operation
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    return cat(tensors, 0 if tensors[0].dim() < 2 else 1)


@operation
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    return cat([one if one.dim() > 1 else one.view(1, -1) for one in tensors])


def pad_sequence(sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0) -> Tensor:
    longest = max(map(len, sequences))
    rows = [pad(one, (0, 0) * (one.dim() - 1) + (0, longest - len(one)), value=padding_value) for one in sequences]
    return stack(rows, 0 if batch_first else 1)


@operation
def split(one: Tensor, sizes: Any, dim: int = 0) -> tuple[Tensor, ...]:
    length = one.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, max(1, length), sizes)]
    if sum(sizes) != length:
        raise RuntimeError(f"split_with_sizes expects split_sizes to sum exactly to {length}, but got {list(sizes)}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(one.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True))


@operation
def chunk(one: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    return split(one, max(1, -(-one.shape[dim] // chunks)), dim)


@operation
def unbind(one: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(one.select(dim, i) for i in range(one.shape[dim]))


@operation
def repeat(one: Tensor, *times: Any) -> Tensor:
    counts = times[0] if isinstance(times[0], (tuple, list)) else times
    one = one.view((1,) * (len(counts) - one.dim()) + tuple(one.shape))
    for dim, count in enumerate(counts):
        one = cat([one] * count, dim) if count else one.narrow(dim, 0, 0)
    return one.clone()


@operation
def repeat_interleave(one: Tensor, repeats: Any = None, dim: int | None = None) -> Tensor:
    if repeats is None:
        return one.made([i for i, count in enumerate(one.values) for _ in range(count)], (sum(one.values),), int64)
    if dim is None:
        one, dim = one.flatten(), 0
    dim = at(dim, one.dim())
    counts = repeats.tolist() if isinstance(repeats, Tensor) and repeats.shape else [int(repeats)] * one.shape[dim]
    order = [i for i, count in zip(range(one.shape[dim]), counts, strict=True) for _ in range(count)]
    return one[(slice(None),) * dim + (order,)]


@operation
def roll(one: Tensor, shifts: int, dims: int = 0) -> Tensor:
    size = one.shape[dims]
    return one[(slice(None),) * at(dims, one.dim()) + ([(i - shifts) % size for i in range(size)],)]


def pad(one: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = 0) -> Tensor:
    """Add numbers around a tensor: before and after its last dimension, then the one before it, and so on."""
    if mode != "constant":
        raise missing(f"F.pad of mode {mode}")
    for dim, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), start=1):
        shape, parts = list(one.shape), []
        for count in (before, after):
            shape[-dim] = max(0, count)
            parts.append(one.made([value or 0] * Size(shape).numel(), shape))
        one = cat([parts[0], one, parts[1]], -dim)
        kept = one.shape[-dim] + min(0, before) + min(0, after)
        one = one.narrow(-dim, max(0, -before), kept)
    return one.clone()


def triangle(one: Tensor, keeps: Any, diagonal: int) -> Tensor:
    rows, columns = one.shape[-2:]
    kept = one.made([keeps(j - i, diagonal) for i, j in product(range(rows), range(columns))], (rows, columns), bool_)
    return masked_fill(one, ~kept, 0)


@operation
def tril(one: Tensor, diagonal: int = 0) -> Tensor:
    return triangle(one, operator.le, diagonal)


@operation
def triu(one: Tensor, diagonal: int = 0) -> Tensor:
    return triangle(one, operator.ge, diagonal)


def one_hot(one: Tensor, num_classes: int) -> Tensor:
    return OPERATIONS["eq"](one[..., None], one.made(range(num_classes), (num_classes,), int64)).to(int64)


# ---- multiplying ----


def dot(one: Sequence[Any], other: Sequence[Any]) -> Any:
    return sum(map(operator.mul, one, other))


@operation
def matmul(one: Tensor, other: Tensor) -> Tensor:
    if one.dim() == 1:
        found = matmul(one[None], other)
        return found[..., 0, :] if other.dim() > 1 else found[0]
    if other.dim() == 1:
        return matmul(one, other[:, None])[..., 0]
    if one.dtype is not other.dtype:
        raise RuntimeError(f"expected m1 and m2 to have the same dtype, but got: {one.dtype} != {other.dtype}")
    (n, k), (k_too, m) = one.shape[-2:], other.shape[-2:]
    if k != k_too:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({n}x{k} and {k_too}x{m})")
    batch = together(one.shape[:-2], other.shape[:-2])
    left, right = one.expand(*batch, n, k).values, other.mT.expand(*batch, m, k).values
    numbers = []
    for i in range(batch.numel()):
        columns = [right[(i * m + j) * k : (i * m + j + 1) * k] for j in range(m)]
        for row in range(i * n, (i + 1) * n):
            mine = left[row * k : (row + 1) * k]
            numbers += [dot(mine, column) for column in columns]
    return one.made(numbers, (*batch, n, m))


Tensor.__matmul__ = matmul  # type: ignore[attr-defined]
for same in ("mm", "bmm", "mv", "dot", "inner"):
    OPERATIONS[same] = matmul


@operation
def outer(one: Tensor, other: Tensor) -> Tensor:
    return one[:, None] * other


@operation
def kron(one: Tensor, other: Tensor) -> Tensor:
    (rows, columns), (n, m) = one.shape, other.shape
    return (one[:, None, :, None] * other[:, None]).reshape(rows * n, columns * m)


@operation
def einsum(formula: str, *tensors: Tensor) -> Tensor:
    """Sum products over the letters that the result does not have."""
    inputs, _, result = formula.replace(" ", "").partition("->")
    letters = inputs.split(",")
    if len(letters) != 2 or not result:
        raise missing(f"einsum {formula!r}")
    rest = max((one.dim() - len(of) + 3 for of, one in zip(letters, tensors, strict=True) if "..." in of), default=0)
    *letters, result = (of.replace("...", "ABCDEFGH"[:rest]) for of in (*letters, result))
    shared = [x for x in letters[0] if x in letters[1] and x in result]
    summed = [x for x in letters[0] if x in letters[1] and x not in result]
    own = [[x for x in letters[i] if x in result and x not in letters[1 - i]] for i in (0, 1)]
    sizes = dict(zip("".join(letters), (size for one in tensors for size in one.shape), strict=True))

    def laid(i: int, *groups: list[str]) -> Tensor:
        order = [letters[i].index(x) for group in groups for x in group]
        return tensors[i].permute(*order).reshape(*(Size(sizes[x] for x in group).numel() for group in groups))

    found = matmul(laid(0, shared, own[0], summed), laid(1, shared, summed, own[1]))
    order = [*shared, *own[0], *own[1]]
    return found.reshape(*(sizes[x] for x in order)).permute(*(order.index(x) for x in result))


def linear(one: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = matmul(one, weight.T)
    return found if bias is None else found + bias


def rms_norm(one: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    wide = one.float() if one.dtype.kind == FLOAT and one.itemsize < 4 else one
    scale = OPERATIONS["rsqrt"](OPERATIONS["mean"](wide * wide, -1, keepdim=True) + (1e-6 if eps is None else eps))
    found = (wide * scale).to(one.dtype)
    return found if weight is None else found * weight


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (repeat_interleave(x, times, dim=-3) for x in (key, value))
    scores = matmul(query, key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = tril(OPERATIONS["ones"](query.shape[-2], key.shape[-2], dtype=bool_))
    if attn_mask is not None:
        is_mask = attn_mask.dtype is bool_
        scores = masked_fill(scores, ~attn_mask, -math.inf) if is_mask else scores + attn_mask
    shares = softmax(scores, -1)
    return matmul(masked_fill(shares, OPERATIONS["isnan"](shares), 0.0), value)
