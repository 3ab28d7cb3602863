"""Lesson 12. Copies blocks from a GPU to host memory beside the steps that follow, so that saving holds up none.

    compute stream   step n writes K and V │ gather │ step n + 1 …
    side stream                                     └─ copy to pinned memory
    copier thread              then to host memory, later to the disk ─┘

The gather stays in the GPU's memory, so it is short. In the compute stream it comes after the kernels that wrote the
blocks, and before any that will write them again. So blocks may be evicted and handed out while the long copy runs:
that copy reads the gathered bytes, which nothing else writes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mini_engine.tiers.background import Background
from mini_engine.tiers.blocks import BlockBytes
from mini_engine.tiers.store import Keep

MAX_COPIES = 4


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Wait until the stream has come to this place."""
        ...


class Stream(Protocol):
    """Work of a device, done in order, at some time: `CudaStream`."""

    def submit(self, work: Callable[[], Any]) -> None:
        """Put work at the end of the stream."""
        ...

    def record(self) -> Any:
        """Return the end of the stream as it is now, an Event."""
        ...

    def wait(self, event: Any) -> None:
        """Begin nothing that is submitted from now on until another stream has come to `event`."""
        ...


class CudaStream:
    """A stream of a GPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def submit(self, work: Callable[[], Any]) -> None:
        """Launch kernels and copies in this stream."""
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> Any:
        """Return the end of the stream. A thread that waits for it sleeps."""
        return self.stream.record_event(torch.cuda.Event(blocking=True))

    def wait(self, event: Any) -> None:
        """Let the stream wait for `event`, not the caller."""
        self.stream.wait_event(event)


@dataclass(frozen=True)
class Copy:
    """Blocks on their way to host memory: what `gathered` holds will be in `pinned` at `done`.

    Both are `[n, payload_bytes]` uint8. `gathered` is kept as long as the copy reads it: torch hands the memory of a
    tensor that is gone to the next one.
    """

    gathered: Tensor
    pinned: Tensor
    done: Event
    keep: Keep

    def finish(self) -> None:
        """Wait until the bytes are here, and hand them on in memory that is not pinned."""
        self.done.synchronize()
        self.keep([row.clone().numpy().data for row in self.pinned])


class BesideSteps:
    """Reads blocks without waiting for them. What is written to them later does not change what is read.

    Args:
        streams: returns the stream that steps run in, and one beside it.
        copier: finishes copies. As long as it has no room for another one, steps read blocks themselves.
    """

    def __init__(
        self, blocks: BlockBytes, streams: Callable[[], tuple[Stream, Stream]], copier: Background[Copy]
    ) -> None:
        self.blocks, self.streams, self.copier = blocks, streams, copier

    def read(self, blocks: Sequence[int], keep: Keep) -> None:
        """Put a gather in the stream of the steps, and behind it a copy in the other one; `keep` is called later."""
        if not self.copier.has_room:
            keep(self.blocks.read(blocks))
            return
        compute, side = self.streams()
        gathered = self.blocks.empty(len(blocks))
        pinned = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=gathered.is_cuda)
        compute.submit(partial(self.blocks.gather, blocks, gathered))
        side.wait(compute.record())
        side.submit(partial(pinned.copy_, gathered, non_blocking=True))
        self.copier.offer(Copy(gathered, pinned, side.record(), keep))


def beside_steps(blocks: BlockBytes) -> BesideSteps:
    """Return a reader of a GPU pool's blocks that works beside its steps, with a stream and a thread of its own."""
    side = CudaStream(torch.cuda.Stream(blocks.device))

    def streams() -> tuple[Stream, Stream]:
        return CudaStream(torch.cuda.current_stream(blocks.device)), side

    return BesideSteps(blocks, streams, Background("kv-tier-copier", Copy.finish, MAX_COPIES))
