"""Lesson 15. Windows as companions of blocks: the window groups' K and V of a block's tokens, in tiers and hand-over.

    tiers, blocks         7   8   9  10  11  12         group 0: every block after the request's prefix
    tiers, windows        7   8   9   ·  11  12         block 10's was dropped
                                      └ a window spans 3 blocks, so no request can resume after 10, 11 or 12;
                                        after 9 one can, with the windows of 7, 8 and 9

A request resumes after the last block whose window is complete; blocks of the window that the request holds already
need no record. Group 0's records are loaded for all tokens, the windows' only for the last ones.

A record's key is derived from the block's, so it identifies the model, whose configuration decides which layers are in
which group, and every token before. Its payload has a block of each window group, in the order of the groups, so a
record cannot be mistaken for another group's or for a block of group 0.
"""

from collections.abc import Sequence

from mini_engine.tiers.records import Bytes, Kind
from mini_engine.tiers.store import Blocks
from mini_engine.windows.memory import WindowMemory


class WindowCompanion:
    """The windows of a model's last blocks, as a companion of blocks.

    Args:
        blocks: copies the pool's blocks, those of any group. memory: has the tables.
    """

    kind = Kind.WINDOW
    only_at_end = False

    def __init__(self, blocks: Blocks, memory: WindowMemory) -> None:
        self.blocks, self.memory = blocks, memory

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of the blocks of all window groups at one position of a text."""
        return self.memory.num_groups * self.blocks.payload_bytes

    def needed(self, start: int, stop: int) -> range:
        """Return the blocks that the next token after block stop - 1 sees.

        The request holds every block that a token after block start - 1 sees, so none is before `start`.
        """
        return range(max(start, self.memory.kept.first_block(stop * self.memory.block_size)), stop)

    def held(self, request_id: str, start: int, stop: int, at_end: bool) -> Sequence[int]:
        """Return the blocks that the request has not freed yet."""
        return range(max(start, self.memory.tables_of(request_id).first), stop)

    def read(self, request_id: str, indices: Sequence[int]) -> Sequence[Bytes]:
        """Return the blocks of all window groups, joined, for each position."""
        parts, num_groups = self.blocks.read(self._blocks(request_id, indices)), self.memory.num_groups
        return [b"".join(parts[at : at + num_groups]) for at in range(0, len(parts), num_groups)]

    def write(self, request_id: str, indices: Sequence[int], payloads: Sequence[Bytes]) -> None:
        """Copy windows into the request's blocks in the window groups."""
        starts = range(0, self.payload_bytes, self.blocks.payload_bytes)
        parts = [payload[start : start + self.blocks.payload_bytes] for payload in payloads for start in starts]
        self.blocks.write(self._blocks(request_id, indices), parts)

    def _blocks(self, request_id: str, indices: Sequence[int]) -> list[int]:
        table = self.memory.tables_of(request_id)
        return [block for index in indices for block in table.at(index)]
