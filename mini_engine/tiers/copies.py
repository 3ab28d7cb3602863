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
from typing import Any

import torch
from torch import Tensor

from mini_engine.tiers.background import Background
from mini_engine.tiers.blocks import BlockBytes
from mini_engine.tiers.store import Keep, Reader

MAX_COPIES = 4


class CudaStream:
    """A stream of a GPU: work that is done in order, at some time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def submit(self, work: Callable[[], Any]) -> None:
        """Put work, which launches kernels and copies, at the end of the stream."""
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> Any:
        """Return the end of the stream as it is now. A thread that waits for it sleeps."""
        return self.stream.record_event(torch.cuda.Event(blocking=True))

    def wait(self, event: torch.cuda.Event) -> None:
        """Begin nothing that is submitted from now on until another stream has come to `event`. Returns at once."""
        self.stream.wait_event(event)


@dataclass(frozen=True)
class Copy:
    """Blocks on their way to host memory: what `gathered` holds will be in `pinned` at `done`.

    Both are `[n, payload_bytes]` uint8. `gathered` is kept as long as the copy reads it: torch hands the memory of a
    tensor that is gone to the next one.
    """

    gathered: Tensor
    pinned: Tensor
    done: torch.cuda.Event
    keep: Keep

    def finish(self) -> None:
        """Wait until the bytes are here, and hand them on in memory that is not pinned."""
        self.done.synchronize()
        self.keep([row.clone().numpy().data for row in self.pinned])


class BesideSteps(Reader):
    """Reads blocks without waiting for them. What is written to them later does not change what is read.

    Args:
        streams: returns the stream that steps run in, and one beside it.
        copier: finishes copies. As long as it has no room for another one, steps read blocks themselves.
    """

    def __init__(
        self, blocks: BlockBytes, streams: Callable[[], tuple[CudaStream, CudaStream]], copier: Background[Copy]
    ) -> None:
        self.blocks: BlockBytes = blocks
        self.streams, self.copier = streams, copier

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

    def streams() -> tuple[CudaStream, CudaStream]:
        return CudaStream(torch.cuda.current_stream(blocks.device)), side

    return BesideSteps(blocks, streams, Background("kv-tier-copier", Copy.finish, MAX_COPIES))
