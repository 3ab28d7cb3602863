"""Lesson 18. Connects the ranks of a model: through shared memory, or through torch.distributed.

Shared memory is for ranks on one machine with a compiler for `meeting.cpp`; gloo needs none. NCCL is for a GPU each. It
has never been run here: only the arguments of its calls are tested.
"""

import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown
from mini_engine.distributed.tensor_parallel.collectives import Collectives, TorchCollectives
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock
from mini_engine.distributed.tensor_parallel.shared_memory import LIBRARY, SharedMemoryCollectives, meeting_bytes

MEETING = timedelta(seconds=8)  # for ranks that are all ready; gloo would keep waiting for one that has died
TRANSPORTS = ("auto", "memory", "gloo", "nccl")
LOOPBACK = ("lo", "lo0")  # its names on Linux and macOS
INTERFACE = "GLOO_SOCKET_IFNAME"


class Transport(Protocol):
    """A connection between ranks. Rank 0 creates it and passes it to the processes that it starts."""

    def collectives(self, rank: int) -> Collectives:
        """Return the collectives of a rank, which may be called after `connect`."""
        ...

    def connect(self, rank: int) -> None:
        """Meet the other ranks; each waits here for all others, unless the first collective does."""

    def interrupt(self) -> None:
        """End this process's waiting in a collective, if another rank's end does not: broken connections do."""

    def disconnect(self) -> None:
        """Drop the connection to the other ranks. Idempotent."""


class MemoryTransport(Transport):
    """Memory that all ranks share. It is freed with the last process that has it.

    Args:
        patience: how long a collective waits for a rank that is alive.

    Raises:
        UserError: there is no compiler for `meeting.cpp`.
    """

    def __init__(self, num_ranks: int, patience: timedelta) -> None:
        LIBRARY.load()  # now in the cache, where every rank finds it
        self.num_ranks, self.patience = num_ranks, patience.total_seconds()
        self.block = SharedBlock(meeting_bytes(num_ranks))

    def collectives(self, rank: int) -> SharedMemoryCollectives:
        """Return the collectives of a rank."""
        return SharedMemoryCollectives(rank, self.num_ranks, self.block, self.patience)

    def interrupt(self) -> None:
        """End all waiting, in every rank."""
        ctypes.c_int32.from_address(self.block.address).value = 1


@dataclass(frozen=True)
class TorchTransport(Transport):
    """A process group of torch.distributed. A process can have only one.

    backend: gloo or nccl. meeting: a file through which ranks find each other's addresses. patience: how long a
        collective waits for a rank that is alive.
    """

    backend: str
    meeting: str
    num_ranks: int
    patience: timedelta

    def collectives(self, rank: int) -> TorchCollectives:
        """Return the collectives of a rank."""
        return TorchCollectives(rank, self.num_ranks)

    def connect(self, rank: int) -> None:
        """Wait for the other ranks."""
        store = dist.FileStore(self.meeting, self.num_ranks)  # pyright: ignore[reportPrivateImportUsage]
        device = torch.device("cuda", rank) if self.backend == "nccl" else None
        with on_this_machine():
            dist.init_process_group(
                self.backend,
                store=store,
                rank=rank,
                world_size=self.num_ranks,
                timeout=min(MEETING, self.patience) if self.backend == "gloo" else self.patience,
                device_id=device,
            )
        if self.backend == "gloo":
            cast(Any, dist.group.WORLD).set_timeout(self.patience)
            dist.barrier()
            Path(self.meeting).unlink(missing_ok=True)  # all have met; nothing is left if all of them are killed now

    def disconnect(self) -> None:
        """Leave the process group, if this process is in it."""
        if dist.is_initialized():
            dist.destroy_process_group()
        Path(self.meeting).unlink(missing_ok=True)


def transport_for(name: str, num_ranks: int, folder: Path, patience: timedelta, device: str = "cpu") -> Transport:
    """Return the transport with this name; "auto" is the best one that works here, and reports a fallback on stderr.

    Args:
        folder: for the file in which ranks find each other if they share no memory. device: the type of the ranks'
            devices.

    Raises:
        UserError: there is no such transport, or it cannot work here, or this process is in another process group.
    """
    if name not in TRANSPORTS:
        raise UserError(f"there is no transport {shown(name)} between ranks; choose one of {', '.join(TRANSPORTS)}")
    if device == "cpu" and name in ("auto", "memory"):
        try:
            return MemoryTransport(num_ranks, patience)
        except UserError as why:
            if name == "memory":
                raise
            sys.stderr.write(f"ranks: {why}. Using gloo: the same tokens, many times slower in decode.\n")
    if dist.is_initialized():
        raise UserError("this process is a rank of another model already; close that one first")
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    if name not in ("auto", backend):
        raise UserError(f"{name} does not connect ranks on {device}; choose auto or {backend}")
    return TorchTransport(backend, str(folder / f"mini-engine-{token_hex(8)}"), num_ranks, patience)


@contextmanager
def on_this_machine() -> Iterator[None]:
    """Let gloo listen on the loopback interface, not on the address that this machine's name resolves to.

    On Windows gloo chooses. A choice in the environment is respected.
    """
    names = {name for _, name in socket.if_nameindex()}
    chosen = next((name for name in LOOPBACK if name in names), None)
    if chosen is None or INTERFACE in os.environ:
        yield
        return
    os.environ[INTERFACE] = chosen
    try:
        yield
    finally:
        del os.environ[INTERFACE]
