"""Lesson 19. Ownership of buffers: memory that two processes share, and the rules by which buffers change hands.

A buffer holds the K and V of one block in transit from the process that computed it, the sender, to the one that asked
for it, the receiver. The receiver owns the memory and keeps this account of it. Lending a buffer gives up the right to
touch it; only the sender's word, or its death, gives that back. So a cancelled request's buffers are not free yet.
"""

from collections.abc import Sequence
from enum import Enum

from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock


class State(Enum):
    """A buffer's state.

    FREE: the receiver may lend it. LENT: the sender may write into it. FILLED: it has a whole block, and the sender is
    done with it. OWED: the sender may write into it, and no request wants it any more.
    """

    FREE = "free"
    LENT = "lent"
    FILLED = "filled"
    OWED = "owed"


class Event(Enum):
    """An event in a buffer's life.

    Of the receiver: LEND puts it into an `Ask`; TAKE, its block has been copied out, or cannot be used; CANCEL, its
    request ended before that, and the sender has not heard of it yet.
    Of the sender: FILL, it says that the block is complete, perhaps before it has heard of a cancel; END, its last word
    about a transfer's buffers, complete or not; LOSE, it is dead.
    """

    LEND = "lend"
    FILL = "fill"
    TAKE = "take"
    CANCEL = "cancel"
    END = "end"
    LOSE = "lose"


def transitions() -> dict[tuple[State, Event], State]:
    """Return the state that follows a state and an event, for each pair that can occur.

    Both ends keep to the protocol. A cancel and the sender's words may cross on their way: the sender ends a transfer
    after a cancel as without one, and that word gives back all that it owes, at once.
    """
    return {
        (State.FREE, Event.LEND): State.LENT,
        (State.LENT, Event.FILL): State.FILLED,
        (State.LENT, Event.CANCEL): State.OWED,
        (State.LENT, Event.END): State.FREE,
        (State.LENT, Event.LOSE): State.FREE,
        (State.FILLED, Event.TAKE): State.FREE,
        (State.FILLED, Event.CANCEL): State.FREE,
        (State.FILLED, Event.END): State.FILLED,
        (State.FILLED, Event.LOSE): State.FILLED,
        (State.OWED, Event.FILL): State.OWED,
        (State.OWED, Event.END): State.FREE,
        (State.OWED, Event.LOSE): State.FREE,
    }


class BrokenProtocol(RuntimeError):
    """An event that is impossible in the buffer's state: the other side cannot be trusted."""


class Buffers:
    """The states of `num_buffers` buffers. Each change applies to all of its buffers or to none.

    Attributes:
        free: the buffers that are free; the next to be lent is the last one.
    """

    def __init__(self, num_buffers: int) -> None:
        self.states = [State.FREE] * num_buffers
        self.free = list(range(num_buffers - 1, -1, -1))

    def count(self, state: State) -> int:
        """Return the number of buffers in a state."""
        return self.states.count(state)

    def lend(self, num_buffers: int) -> list[int] | None:
        """Lend the sender free buffers and return them. If there are too few, lend none and return None."""
        if num_buffers > len(self.free):
            return None
        return self.happen(Event.LEND, [self.free[-1 - index] for index in range(num_buffers)])

    def happen(self, event: Event, buffers: Sequence[int]) -> list[int]:
        """Apply an event to buffers; return them.

        Raises:
            BrokenProtocol: the event is impossible for one of them; nothing was changed.
        """
        table = transitions()
        after = [table.get((self.states[buffer], event)) for buffer in buffers]
        for buffer, state in zip(buffers, after, strict=True):
            if state is None:
                raise BrokenProtocol(f"{event.value} happened to buffer {buffer}, which is {self.states[buffer].value}")
        for buffer, state in zip(buffers, after, strict=True):
            assert state is not None
            self._set(buffer, state)
        return list(buffers)

    def _set(self, buffer: int, state: State) -> None:
        before, self.states[buffer] = self.states[buffer], state
        if before is State.FREE:
            self.free.remove(buffer)
        elif state is State.FREE:
            self.free.append(buffer)


class Stage:
    """The shared memory: `num_buffers` buffers of `buffer_bytes` bytes. Both processes have one over the same block.

    Args:
        block: of at least num_buffers * buffer_bytes bytes.
    """

    def __init__(self, block: SharedBlock, num_buffers: int, buffer_bytes: int) -> None:
        self.block, self.num_buffers, self.buffer_bytes = block, num_buffers, buffer_bytes
        self.memory = block.buffer

    def write(self, buffer: int, payload: bytes | bytearray | memoryview) -> None:
        """Copy a payload into a buffer. Raises ValueError if it is too long."""
        if len(payload) > self.buffer_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes does not fit into a buffer of {self.buffer_bytes}")
        start = buffer * self.buffer_bytes
        self.memory[start : start + len(payload)] = memoryview(payload).cast("B")

    def read(self, buffer: int) -> memoryview:
        """Return a view of a buffer."""
        return self.memory[buffer * self.buffer_bytes : (buffer + 1) * self.buffer_bytes]
