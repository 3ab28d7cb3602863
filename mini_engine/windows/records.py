"""Lesson 15. Records of windows: the window groups' K and V of a block's tokens, kept next to the block's own record.

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

import hashlib
from collections.abc import Sequence

from mini_engine.tiers.companions import all_or_none
from mini_engine.tiers.records import Kind, Record, Wanted
from mini_engine.tiers.store import Blocks, Prefix
from mini_engine.tiers.tiers import Tiers
from mini_engine.windows.memory import WindowMemory


class WindowRecords:
    """The windows of a model's last blocks, as companions of blocks in lesson 12's tiers.

    Args:
        tiers: hold the records. blocks: copies the pool's blocks, those of any group. memory: has the tables.
    """

    def __init__(self, tiers: Tiers, blocks: Blocks, memory: WindowMemory) -> None:
        self.tiers, self.blocks, self.memory = tiers, blocks, memory

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of the blocks of all window groups at one position of a text."""
        return self.memory.num_groups * self.blocks.payload_bytes

    def wanted(self, prefix: Prefix, start: int, blocks: list[Wanted]) -> list[Wanted]:
        """Return the blocks up to the last one after which a request can resume, and the windows needed there."""
        stop = self.last_end(prefix, start, start + len(blocks))
        windows = range(max(start, self._first(stop)), stop)
        return [*blocks[: stop - start], *(wanted_window(prefix, index, self.payload_bytes) for index in windows)]

    def last_end(self, prefix: Prefix, start: int, stop: int) -> int:
        """Return the largest end in `start` … `stop` after which the tiers have every block that the next token sees.

        The request holds every block that a token after block start - 1 sees, so nothing before `start` is requested.
        """
        end = index = stop
        while index > max(start, self._first(end)):
            index -= 1
            if window_key(prefix.keys[index + 1]) not in self.tiers:
                end = index
        return end

    def useful(self, wanted: Sequence[Wanted], records: Sequence[Record]) -> Sequence[Record]:
        """Return all records if everything wanted is there, otherwise none: the windows come last."""
        return all_or_none(wanted, records)

    def write(self, request_id: str, records: Sequence[Record]) -> None:
        """Copy windows into the request's last blocks in the window groups."""
        table, size = self.memory.tables_of(request_id), self.blocks.payload_bytes
        blocks = [block for index in range(len(table) - len(records), len(table)) for block in table.at(index)]
        starts = range(0, self.payload_bytes, size)
        self.blocks.write(blocks, [record.payload[start : start + size] for record in records for start in starts])

    def new(self, request_id: str, prefix: Prefix, start: int, stop: int, is_kept: bool) -> list[tuple[int, Record]]:
        """Return the windows of the request's blocks start … stop - 1, unless host memory has them.

        Blocks that the request has freed already are left out.
        """
        table, num_groups = self.memory.tables_of(request_id), self.memory.num_groups
        indices = range(max(start, table.first), min(stop, len(prefix)))
        new = [index for index in indices if window_key(prefix.keys[index + 1]) not in self.tiers.host]
        if not new:
            return []
        parts = self.blocks.read([block for index in new for block in table.at(index)])
        payloads = [b"".join(parts[at : at + num_groups]) for at in range(0, len(parts), num_groups)]
        return [(index, window_record(prefix, index, payload)) for index, payload in zip(new, payloads, strict=True)]

    def _first(self, num_blocks: int) -> int:
        return self.memory.kept.first_block(num_blocks * self.memory.block_size)


def window_key(key: bytes) -> bytes:
    """Return the key of the windows of the block with the key `key`."""
    return hashlib.sha256(key + b"window").digest()


def window_record(prefix: Prefix, index: int, payload: bytes) -> Record:
    """Return the record of the windows of block `index`."""
    key, _, tokens = prefix.part(index)
    return Record(window_key(key), key, tokens, payload, Kind.WINDOW)


def wanted_window(prefix: Prefix, index: int, payload_bytes: int) -> Wanted:
    """Return the Wanted for the windows of block `index`."""
    key, _, tokens = prefix.part(index)
    return Wanted(window_key(key), key, tokens, payload_bytes, Kind.WINDOW)
