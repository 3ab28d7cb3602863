"""Lesson 10. Moves the tensors of a step to the device in one copy instead of one for each.

The cost of a small copy is the call, not its bytes. So tensors that change together are laid out in one block of
memory, on the host and on the device, and one copy moves the block. The host's block is pinned: a GPU can read only
memory that the system does not move, and unpinned memory is first copied to pinned memory while the host waits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mini_engine.engine.runner import Step

ALIGNMENT = 16  # bytes; for a tensor with any other alignment Triton compiles a separate, slower kernel
CPU = torch.device("cpu")


class Table(NamedTuple):
    """Shape and dtype of one tensor in a block."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in the block in bytes: the tensor's, rounded up so that the next one is aligned."""
        return -(-prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def block_of(tables: Iterable[Table], device: torch.device, pin_memory: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Return a zeroed block `[n]` uint8 and its tensors, which are views of it in the given order."""
    tables = list(tables)
    block = torch.zeros(sum(table.bytes for table in tables), dtype=torch.uint8, device=device, pin_memory=pin_memory)
    views, start = [], 0
    for table in tables:
        stop = start + prod(table.shape) * table.dtype.itemsize
        views.append(block[start:stop].view(table.dtype).view(table.shape))
        start += table.bytes
    return block, views


class Staging:
    """A block on the host that is filled repeatedly, and the copy of its first bytes to a block on the device.

    The copy is asynchronous. If the host refilled the block too early, the copy would pick up parts of the next step,
    so `filling` first waits for the last copy. As long as the sampler waits for a step's tokens, that copy has long
    ended. A second block would save the wait for a host that runs further ahead.
    """

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self.host, self.device = host, device
        self.sent = torch.cuda.Event() if device.device.type == "cuda" else None  # a CPU copies at once

    @contextmanager
    def filling(self, num_bytes: int) -> Iterator[None]:
        """Let the `with` block fill the host's block, then copy its first `num_bytes`, unless there is an error."""
        if self.sent is not None:
            self.sent.synchronize()
        yield
        self.device[:num_bytes].copy_(self.host[:num_bytes], non_blocking=True)
        if self.sent is not None:
            self.sent.record()


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Move tensors from the host to the device in one copy. Shapes and dtypes stay.

    For shapes that change from call to call. The host's block is new each time, so no earlier copy is reading it: torch
    keeps released pinned memory until its copies are complete.
    """
    tables = [Table(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    host, views = block_of(tables, CPU, pin_memory=device.type == "cuda")
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    moved, views = block_of(tables, device)
    moved.copy_(host, non_blocking=True)
    return views


def uploaded(step: Step, device: torch.device) -> Step:
    """Move a step planned on the host to the device in one copy, tensors inside tuples included."""
    names = [field.name for field in fields(step.meta)]
    whole = step.token_ids, step.rows, tuple(getattr(step.meta, name) for name in names)
    tensors: list[Tensor] = []
    with_tensors(whole, lambda tensor: tensors.append(tensor))
    moved = iter(upload(tensors, device))
    token_ids, rows, values = with_tensors(whole, lambda _: next(moved))
    return Step(token_ids, replace(step.meta, **dict(zip(names, values, strict=True))), rows)


def with_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a value with `change` applied to each tensor, also inside tuples, which lesson 11's plan has."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [with_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
