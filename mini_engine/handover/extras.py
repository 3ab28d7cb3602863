"""Lesson 19. Extras that are handed over with blocks, for models that need more than the K and V in them.

A hybrid needs the state after the last block (lesson 11), windows the last blocks of their groups (lesson 15). Latents
are K and V to the pool (lesson 16). Extras are cut into buffers, which follow those of the blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mini_engine.tiers.records import Bytes
from mini_engine.tiers.states import Slots
from mini_engine.tiers.store import Blocks


class Extras(Protocol):
    """The buffers that follow those of the blocks.

    num_bytes: size of the extras, for the handshake. only_at_end: they can be read only while the request's memories
        are exactly at the end of the last block, like a state.
    """

    only_at_end: bool

    @property
    def num_bytes(self) -> int: ...

    def num_buffers(self, start: int, stop: int) -> int:
        """Return the number of buffers that come with blocks start … stop - 1."""
        ...

    def read(self, request_id: str, start: int, stop: int) -> Sequence[Bytes]:
        """Return their contents. The request's memories are at the end of block stop - 1."""
        ...

    def write(self, request_id: str, start: int, stop: int, buffers: Sequence[Bytes]) -> None:
        """Copy contents into the memories of a request that has blocks start … stop - 1 to fill.

        Args:
            buffers: complete ones, possibly of more blocks than these: then the last ones count.
        """
        ...


class NoExtras:
    """The extras of a model with K and V alone: none."""

    num_bytes = 0
    only_at_end = False

    def num_buffers(self, start: int, stop: int) -> int:
        """Return 0."""
        return 0

    def read(self, request_id: str, start: int, stop: int) -> Sequence[Bytes]:
        """Return an empty sequence."""
        return ()

    def write(self, request_id: str, start: int, stop: int, buffers: Sequence[Bytes]) -> None:
        """Do nothing."""


class StateExtras:
    """The state of a hybrid after the last block, cut into pieces of a buffer's size.

    Args:
        slots: copies states. slots_of: returns a request's slots, its own first. buffer_bytes: size of one buffer.
    """

    only_at_end = True

    def __init__(self, slots: Slots, slots_of: Callable[[str], Sequence[int]], buffer_bytes: int) -> None:
        self.slots, self.slots_of, self.buffer_bytes = slots, slots_of, buffer_bytes

    @property
    def num_bytes(self) -> int:
        """Size of a state in bytes."""
        return self.slots.payload_bytes

    def num_buffers(self, start: int, stop: int) -> int:
        """Return the number of buffers that a state takes."""
        return -(-self.num_bytes // self.buffer_bytes)

    def read(self, request_id: str, start: int, stop: int) -> Sequence[Bytes]:
        """Return the request's state in pieces."""
        state = memoryview(self.slots.read(self.slots_of(request_id)[0]))
        return [state[at : at + self.buffer_bytes] for at in range(0, len(state), self.buffer_bytes)]

    def write(self, request_id: str, start: int, stop: int, buffers: Sequence[Bytes]) -> None:
        """Copy the state into the request's slot."""
        self.slots.write(self.slots_of(request_id)[0], b"".join(buffers)[: self.num_bytes])


class WindowExtras:
    """The last blocks of all window groups, those that the token after the last block sees; a buffer for each.

    Args:
        blocks: copies the pool's blocks, those of any group. memory: lesson 15's, which has the tables.
    """

    only_at_end = False

    def __init__(self, blocks: Blocks, memory: Any) -> None:
        self.blocks, self.memory = blocks, memory

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the blocks of all groups at one position of a text."""
        return self.memory.num_groups * self.blocks.payload_bytes

    def num_buffers(self, start: int, stop: int) -> int:
        """Return the number of blocks of all groups that the token after block stop - 1 sees and the receiver lacks."""
        return len(self._places(start, stop)) * self.memory.num_groups

    def read(self, request_id: str, start: int, stop: int) -> Sequence[Bytes]:
        """Return the contents of these blocks, position by position."""
        table = self.memory.tables_of(request_id)
        return self.blocks.read([block for index in self._places(start, stop) for block in table.at(index)])

    def write(self, request_id: str, start: int, stop: int, buffers: Sequence[Bytes]) -> None:
        """Copy them into the request's blocks. Blocks before `start` are shared, and there already."""
        table = self.memory.tables_of(request_id)
        targets = [block for index in self._places(start, stop) for block in table.at(index)]
        self.blocks.write(targets, buffers[len(buffers) - len(targets) :])

    def _places(self, start: int, stop: int) -> range:
        return range(max(start, self.memory.kept.first_block(stop * self.memory.block_size)), stop)
