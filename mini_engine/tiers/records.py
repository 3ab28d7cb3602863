"""Lesson 12. A record: the K and V of one block, or what belongs to its end, as bytes that can be trusted.

    magic · version · kind · bytes of tokens · bytes of payload · key · parent │ tokens │ payload │ CRC-32 of all that

The length tells a record that was cut off, the CRC one that was damaged. Key, parent and tokens tell one that is intact
but belongs to another model, another namespace or another text. Whatever differs is a miss, never an answer.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from mini_engine.tiers.keys import KEY_BYTES

Bytes = bytes | bytearray | memoryview
MAGIC = b"KVRECORD"
VERSION = 1
HEADER = struct.Struct(f"<8sHHIQ{KEY_BYTES}s{KEY_BYTES}s")
CRC = struct.Struct("<I")


class Kind(IntEnum):
    """The kind of a payload: K and V of a block, a recurrent state at its end (lesson 11), or windows (lesson 15)."""

    KV = 1
    STATE = 2
    WINDOW = 3


class BadRecord(ValueError):
    """Stored bytes are not the record that was asked for.

    reason: one word, for counting. "truncated": its length is not what its header says. "version": of another version.
    "damaged": the CRC differs, or the kind is unknown. "foreign": intact, but another record. Without MAGIC at its
    beginning it is of another version or damaged.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the stored record is unusable: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Record:
    """One block's payload, and what it belongs to.

    key, parent: this block's key and its predecessor's (`keys.chain`).
    tokens: the block's tokens, 4 bytes each. payload: `[bytes]`, in the layout of `blocks.BlockBytes`.
    """

    key: bytes
    parent: bytes
    tokens: bytes
    payload: Bytes
    kind: Kind = Kind.KV

    @property
    def num_bytes(self) -> int:
        """Size of the packed record."""
        return HEADER.size + len(self.tokens) + len(self.payload) + CRC.size

    def packed(self) -> list[Bytes]:
        """Return the record's parts, to be written one after another; the payload is not copied."""
        sizes = len(self.tokens), len(self.payload)
        header = HEADER.pack(MAGIC, VERSION, self.kind, *sizes, self.key, self.parent)
        crc = zlib.crc32(self.payload, zlib.crc32(header + self.tokens))
        return [header, self.tokens, self.payload, CRC.pack(crc)]


@dataclass(frozen=True)
class Wanted:
    """The record that a lookup expects; `parse` compares everything but the payload itself.

    payload_bytes: the size of a payload in this pool.
    """

    key: bytes
    parent: bytes
    tokens: bytes
    payload_bytes: int
    kind: Kind = Kind.KV

    def parse(self, stored: Bytes) -> Record:
        """Return the record in `stored`, its payload a view of it.

        Raises:
            BadRecord: it is cut off, damaged, of another version, or not the one that is wanted.
        """
        record = unpack(stored)
        found = record.key, record.parent, record.tokens, len(record.payload), record.kind
        if found != (self.key, self.parent, self.tokens, self.payload_bytes, self.kind):
            raise BadRecord("foreign")
        return record


def unpack(stored: Bytes) -> Record:
    """Return the record in `stored`, whatever it is about; its payload is a view.

    Raises:
        BadRecord: it is cut off, damaged or of another version.
    """
    view = memoryview(stored)
    if len(view) < HEADER.size + CRC.size:
        raise BadRecord("truncated")
    magic, version, kind, num_token_bytes, num_payload_bytes, key, parent = HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise BadRecord("version")
    if len(view) != HEADER.size + num_token_bytes + num_payload_bytes + CRC.size:
        raise BadRecord("truncated")
    if CRC.unpack_from(view, len(view) - CRC.size)[0] != zlib.crc32(view[: -CRC.size]) or kind not in list(Kind):
        raise BadRecord("damaged")
    start = HEADER.size + num_token_bytes
    return Record(key, parent, bytes(view[HEADER.size : start]), view[start : -CRC.size], Kind(kind))
