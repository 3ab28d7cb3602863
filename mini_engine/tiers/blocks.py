"""Lesson 12. Copies blocks and states between their pools and records: all layers are one contiguous run of bytes.

    payload of a block = K of layer 0 │ V of layer 0 │ K of layer 1 │ …         each [block_size, H_kv, D]
    payload of a state = recurrent states of all layers, float32 │ convolution states of all layers

Contiguous, because a tier is read in large pieces or slowly.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_engine.tiers.records import Bytes


class BlockBytes:
    """Reads and writes whole blocks of a pool's tensors as bytes.

    Args:
        parts: the pool's, lists of one tensor per layer, `[num_blocks, …]` each; a state pool's blocks are its slots.
            They are looked up at each call: a pool that shrinks puts new tensors into its lists.
    """

    def __init__(self, *parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self.sizes = [tensor[0].nbytes for tensor in self.tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """The pool's tensors in the order of the payload: K of layer 0, V of layer 0, K of layer 1, …"""
        return [tensor for layer in zip(*self.parts, strict=True) for tensor in layer]

    @property
    def payload_bytes(self) -> int:
        """Size of one block in all layers."""
        return sum(self.sizes)

    @property
    def device(self) -> torch.device:
        """The pool's device."""
        return self.parts[0][0].device

    def read(self, blocks: Sequence[int]) -> Sequence[Bytes]:
        """Return a copy of each block's bytes, `payload_bytes` each."""
        if self.device.type != "cpu":
            return [memoryview(row) for row in self.gather(blocks, self.empty(len(blocks))).cpu().numpy()]
        rows = [tensor.flatten(1).view(torch.uint8).numpy() for tensor in self.tensors]
        return [bytearray().join([row[block] for row in rows]) for block in blocks]  # threads would wait for each other

    def empty(self, num_blocks: int) -> Tensor:
        """Return room for the payloads of so many blocks, on the pool's device: `[num_blocks, payload_bytes]` uint8."""
        return torch.empty(num_blocks, self.payload_bytes, dtype=torch.uint8, device=self.device)

    @torch.inference_mode()
    def gather(self, blocks: Sequence[int], out: Tensor) -> Tensor:
        """Copy blocks to `out`, `[len(blocks), payload_bytes]` uint8 on the pool's device, and return it.

        On a GPU the call returns before the copy is done.
        """
        index = torch.tensor(blocks, dtype=torch.int64, pin_memory=out.is_cuda).to(self.device, non_blocking=True)
        rows = [tensor.index_select(0, index).flatten(1).view(torch.uint8) for tensor in self.tensors]
        return torch.cat(rows, dim=1, out=out)

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], payloads: Sequence[Bytes]) -> None:
        """Copy payloads into blocks. Raises ValueError if there is not one of the right size for each block."""
        if [len(payload) for payload in payloads] != [self.payload_bytes] * len(blocks):
            raise ValueError(f"{len(blocks)} blocks need as many payloads of {self.payload_bytes} bytes each")
        rows = [tensor.flatten(1).view(torch.uint8) for tensor in self.tensors]
        for block, payload in zip(blocks, payloads, strict=True):  # on a CPU a fourth of the time of one index_copy_
            source = torch.frombuffer(writable(payload), dtype=torch.uint8).to(rows[0].device)
            for row, part in zip(rows, source.split(self.sizes), strict=True):
                row[block].copy_(part)


def writable(payload: Bytes) -> Bytes:
    """Return the payload, or a copy of it if it is read-only, which torch warns of."""
    return bytearray(payload) if memoryview(payload).readonly else payload
