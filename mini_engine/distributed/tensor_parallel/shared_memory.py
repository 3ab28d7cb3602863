"""Lesson 18. The collectives of ranks on one machine, through shared memory; `meeting.h` explains the algorithm.

gloo sends each sum through sockets, which wakes a thread at either end; here the parts are read in place.
"""

import ctypes
from ctypes import POINTER, c_double, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mini_engine.base.native_build import SUFFIXES, Library, Signature
from mini_engine.distributed.tensor_parallel.collectives import Traffic
from mini_engine.layers.exchange import NativeExchange

HERE = Path(__file__).parent
LINE_BYTES = 64
PLACE_BYTES = 2**18  # of one rank's part: small enough to be partly in the writer's cache when the others read it
WHY = {1: "a rank has ended", 2: "a rank did not join a collective in time"}


class Meeting(ctypes.Structure):
    """`meeting.h`'s struct: one rank's view of the memory."""

    _fields_ = (
        ("shared", c_void_p),
        *((name, c_int64) for name in ("rank", "num_ranks", "capacity")),
        ("count", c_uint64),
        ("calls", c_int64),
        ("bytes", c_int64),
        ("seconds", c_double),
        ("lost", c_void_p),
        ("patience", c_double),
    )


LIBRARY = Library(
    (HERE / "meeting.cpp", HERE / "meeting.h", HERE.parents[1] / "attention" / "vectors.h"),
    {
        "all_reduce": Signature((POINTER(Meeting), c_void_p, c_int64)),
        "gather": Signature((POINTER(Meeting), c_void_p, c_int64, c_void_p)),
    },
)


class Shared(Protocol):
    """Memory that all ranks share, zero at first. address: of its first byte in this process."""

    @property
    def address(self) -> int: ...


class SharedMemoryCollectives:
    """The collectives of one rank. Sums are the same in all ranks, bit for bit: each adds in the order of the ranks.

    Args:
        shared: `bytes_for(num_ranks, place_bytes)` bytes, which must outlive this.
        lost_address: of an int32 in shared memory; any value but 0 ends all waiting.
        patience: seconds to wait for a rank that is alive.
        place_bytes: size of each rank's place; longer parts go in pieces.

    Raises:
        UserError: the library cannot be built here.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        shared: Shared,
        lost_address: int,
        patience: float,
        place_bytes: int = PLACE_BYTES,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        LIBRARY.load()
        self.shared = shared
        self.meeting = Meeting(
            shared=shared.address,
            rank=rank,
            num_ranks=num_ranks,
            capacity=place_bytes,
            lost=lost_address,
            patience=patience,
        )

    @property
    def traffic(self) -> Traffic:
        """This rank's traffic so far, C++'s calls included."""
        return Traffic(self.meeting.calls, self.meeting.bytes, self.meeting.seconds)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add x over all ranks, in place, and return it. Sums are in float32, rounded once.

        Raises:
            RuntimeError: a rank has ended, or did not join in time.
        """
        if x.dtype not in SUFFIXES:  # float16, which the compiled collectives do not support
            return x.copy_(self.all_reduce(x.float()))
        whole = x.contiguous()
        self.check(LIBRARY.function("all_reduce", x.dtype)(self.meeting, whole.data_ptr(), x.numel()))
        return x if whole is x else x.copy_(whole)

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x `[R, n]` side by side in rank 0, and x in the others. RuntimeError as `all_reduce`."""
        x = x.contiguous()
        out = x.new_empty(self.num_ranks if self.rank == 0 else 0, *x.shape)
        self.check(LIBRARY.function("gather")(self.meeting, x.data_ptr(), x.nbytes, out.data_ptr()))
        return out.transpose(0, 1).flatten(1) if self.rank == 0 else x

    def check(self, why: int) -> None:
        """Raise RuntimeError unless `why`, a collective's result, is 0."""
        if why:
            raise RuntimeError(WHY[why])

    def native(self, dtype: torch.dtype) -> NativeExchange:
        """Return the exchange that lesson 9's C++ calls in place of `all_reduce`."""
        address = LIBRARY.address("all_reduce", dtype)
        return NativeExchange(address, ctypes.addressof(self.meeting), self.rank == 0)


def bytes_for(num_ranks: int, place_bytes: int = PLACE_BYTES) -> int:
    """Return the size in bytes of the memory that `num_ranks` ranks share: their flags, and two places for each."""
    return num_ranks * (LINE_BYTES + 2 * place_bytes)
