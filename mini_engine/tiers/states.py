"""Lesson 12. Copies lesson 11's states between their pool and records: one slot of every layer is one run of bytes.

    payload = recurrent states of all layers, float32 │ convolution states of all layers

A checkpoint's record is kept beside the block at whose end the state was taken. Both have the same tokens behind them,
so the name of one is made from the name of the other.
"""

import hashlib

import torch

from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.tiers.records import Bytes, Kind, Record, Wanted
from mini_engine.tiers.store import Prefix


class StateBytes:
    """Reads and writes whole slots of a state pool as bytes."""

    def __init__(self, pool: GdnPool) -> None:
        self.pool = pool
        self.sizes = [tensor[:, 0].nbytes for tensor in (pool.recurrent_state, pool.conv_state)]

    @property
    def payload_bytes(self) -> int:
        """Size of one slot in all layers."""
        return sum(self.sizes)

    @torch.inference_mode()
    def read(self, slot: int) -> memoryview:
        """Return a copy of a slot's bytes."""
        parts = (self.pool.recurrent_state[:, slot], self.pool.conv_state[:, slot])
        whole = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
        return whole.cpu().numpy().data

    @torch.inference_mode()
    def write(self, slot: int, payload: Bytes) -> None:
        """Copy a payload into a slot. Raises ValueError if it does not have a slot's size."""
        if len(payload) != self.payload_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes does not fill a slot of {self.payload_bytes}")
        parts = torch.frombuffer(bytearray(payload), dtype=torch.uint8).split(self.sizes)
        for target, part in zip((self.pool.recurrent_state, self.pool.conv_state), parts, strict=True):
            target[:, slot] = part.view(target.dtype).view(target[:, slot].shape).to(target.device)


def state_key(key: bytes) -> bytes:
    """Return the key of the state at the end of the block called `key`."""
    return hashlib.sha256(key + b"state").digest()


def state_record(prefix: Prefix, index: int, payload: Bytes) -> Record:
    """Return the record of the state at the end of block `index`."""
    key, _, tokens = prefix.part(index)
    return Record(state_key(key), key, tokens, payload, Kind.STATE)


def wanted_state(prefix: Prefix, index: int, payload_bytes: int) -> Wanted:
    """Return what to ask for to get the state at the end of block `index`."""
    key, _, tokens = prefix.part(index)
    return Wanted(state_key(key), key, tokens, payload_bytes, Kind.STATE)
