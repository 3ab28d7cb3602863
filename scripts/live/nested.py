"""Course machinery. Nested lists of numbers, the data of `small_torch`'s tensors."""

from collections.abc import Callable
from typing import Any

Data = Any  # a number, or a list of Data


def each(act: Callable[[Any], Any], data: Data) -> Data:
    return [each(act, row) for row in data] if isinstance(data, (list, tuple)) else act(data)


def both(one: Data, other: Data, act: Callable[[Any, Any], Any]) -> Data:
    if not isinstance(one, list):
        return act(one, other)
    others = other if isinstance(other, list) else [other] * len(one)
    return [both(a, b, act) for a, b in zip(one, others, strict=True)]


def flat(data: Data) -> list[Any]:
    return [number for row in data for number in flat(row)] if isinstance(data, list) else [data]


def shape_of(data: Data) -> tuple[int, ...]:
    return (len(data), *(shape_of(data[0]) if data else ())) if isinstance(data, list) else ()


def plain(key: Any) -> Any:
    """Return an index as numbers: a tensor's data, or the index unchanged."""
    return key.tolist() if hasattr(key, "tolist") else key


def picked(data: Data, key: Any) -> Data:
    if isinstance(key, tuple):
        rows = picked(data, key[0])
        if len(key) == 1:
            return rows
        return picked(rows, key[1:]) if isinstance(key[0], int) else [picked(row, key[1:]) for row in rows]
    index = plain(key)
    if isinstance(index, list) and index and isinstance(index[0], bool):
        return [row for row, is_in in zip(data, index, strict=True) if is_in]
    return [data[i] for i in index] if isinstance(index, list) else data[index]


def filled_like(data: Data, number: Any) -> Data:
    return each(lambda old: type(old)(number), data)


def nested(shape: tuple[int, ...], make: Callable[[], Any]) -> Data:
    return [nested(shape[1:], make) for _ in range(shape[0])] if shape else make()


def sizes_of(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
