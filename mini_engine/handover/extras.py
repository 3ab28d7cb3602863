"""Lesson 19. Extras that are handed over with blocks: the items of lesson 12's companions, cut into buffers.

A hybrid needs the state after the last block (lesson 11), windows the last blocks of their groups (lesson 15). Latents
are K and V to the pool (lesson 16). Extras follow the buffers of the blocks.
"""

from collections.abc import Sequence

from mini_engine.tiers.companions import Companion
from mini_engine.tiers.records import Bytes


class ExtraBuffers:
    """The buffers that follow those of the blocks: item by item, in the order of the blocks that they go with.

    Args:
        companions: what a request needs besides blocks. buffer_bytes: size of one buffer; an item may take several.

    Attributes:
        only_at_end: they can be read only while the request's memories are exactly at the end of the last block.
    """

    def __init__(self, companions: Sequence[Companion], buffer_bytes: int) -> None:
        self.companions, self.buffer_bytes = companions, buffer_bytes
        self.only_at_end = any(one.only_at_end for one in companions)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of one item of each companion, for the handshake."""
        return sum(one.payload_bytes for one in self.companions)

    def num_buffers(self, start: int, stop: int) -> int:
        """Return the number of buffers that come with blocks start … stop - 1."""
        return sum(self._pieces(one) * len(one.needed(start, stop)) for one in self.companions)

    def read(self, request_id: str, start: int, stop: int) -> Sequence[Bytes]:
        """Return their contents. The request's memories are at the end of block stop - 1."""
        read = {one: iter(one.read(request_id, one.needed(start, stop))) for one in self.companions}
        payloads = [memoryview(next(read[one])) for one in self._items(start, stop)]
        size = self.buffer_bytes
        return [payload[at : at + size] for payload in payloads for at in range(0, len(payload), size)]

    def write(self, request_id: str, start: int, stop: int, buffers: Sequence[Bytes]) -> None:
        """Copy contents into the memories of a request that has blocks start … stop - 1 to fill.

        Args:
            buffers: complete ones, possibly of more blocks than these: then the last ones count.
        """
        mine: dict[Companion, list[Bytes]] = {one: [] for one in self.companions}
        at = len(buffers) - self.num_buffers(start, stop)
        for one in self._items(start, stop):
            first, at = at, at + self._pieces(one)
            mine[one].append(b"".join(buffers[first:at])[: one.payload_bytes])
        for one, payloads in mine.items():
            if payloads:
                one.write(request_id, one.needed(start, stop), payloads)

    def _items(self, start: int, stop: int) -> list[Companion]:
        """Return each item's companion, by the blocks that the items go with."""
        items = [(index, one) for one in self.companions for index in one.needed(start, stop)]
        return [one for _, one in sorted(items, key=lambda item: item[0])]

    def _pieces(self, one: Companion) -> int:
        """Return the number of buffers that an item takes."""
        return -(-one.payload_bytes // self.buffer_bytes)
