"""Lesson 13. What rank 0 sends to the other ranks: sizes of pools, steps, copies; as bytes through a pipe each.

A pipe, not a collective: a rank may wait for the next step for days, and a collective needs a time limit.
"""

import io
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mini_engine.attention.registry import load_kernel
from mini_engine.config import Qwen3Config
from mini_engine.engine.runner import Step
from mini_engine.kv.block_tensor import KvPool
from mini_engine.model.qwen3 import Qwen3ForCausalLM


class PoolSize(NamedTuple):
    """Make a pool: what all ranks need to know for it."""

    num_blocks: int
    block_size: int
    kernel: str

    def make(self, model: Qwen3ForCausalLM, share: Qwen3Config, kind: Callable[..., KvPool] = KvPool) -> KvPool:
        """Return a rank's pool, made by `kind`; UserError if that is impossible."""
        attend = load_kernel(self.kernel, model.device, model.dtype)
        return kind(share, self.num_blocks, self.block_size, attend, model.dtype, model.device)


class Copy(NamedTuple):
    """Copy blocks of the pool, as `KvPool.copy_blocks` does."""

    sources: list[int]
    targets: list[int]


Message = PoolSize | Copy | Step


class StepPickler(pickle.Pickler):
    """Pickles tensors as arrays: a step of six takes 0.03 ms instead of the 0.5 ms of torch's own way."""

    def reducer_override(self, value: Any) -> Any:
        """Called for every object. NotImplemented means the usual way."""
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented


def packed(message: Message) -> bytes:
    """Return a message as bytes."""
    buffer = io.BytesIO()
    StepPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def receive(pipe: "Connection[Any, Any]") -> Message:
    """Wait for the next message. EOFError: the sender is gone."""
    return pickle.loads(pipe.recv_bytes())
