"""Lesson 19. Shared by the tests: both ends without processes, over a pool of numbers."""

from array import array

from mini_engine.handover.extras import ExtraBuffers
from mini_engine.handover.protocol import Ask
from mini_engine.handover.receiver import ReceivingConnector
from mini_engine.handover.sender import SendingConnector
from mini_engine.handover.stage import BrokenProtocol, Event, Stage, State
from mini_engine.handover.transfers import Transfers
from tests.shared.tier_cells import SIZE, Cells, digests


class Memory:
    """Memory like a SharedBlock's, of this process alone."""

    def __init__(self, size):
        self.size, self.buffer = size, memoryview(bytearray(size))


def stage_of(num_buffers):
    """Return a stage whose buffers are as large as a block of `Cells`."""
    return Stage(Memory(num_buffers * Cells.payload_bytes), num_buffers, Cells.payload_bytes)


def following(state, event):
    """Return the state after an event, by what states mean; None if the event is impossible."""
    is_senders = state in (State.LENT, State.OWED)
    possible = {Event.LEND: state is State.FREE, Event.FILL: is_senders, Event.TAKE: state is State.FILLED}
    if not possible.get(event, state is not State.FREE) or (state, event) == (State.OWED, Event.CANCEL):
        return None
    if event is Event.LEND:
        return State.LENT
    if event in (Event.FILL, Event.CANCEL) and is_senders:
        return State.FILLED if (state, event) == (State.LENT, Event.FILL) else State.OWED
    return state if state is State.FILLED and event in (Event.END, Event.LOSE) else State.FREE


class Ledger:
    """Does what task 1's Buffers do, for the tests of other tasks."""

    def __init__(self, num_buffers):
        self.states = [State.FREE] * num_buffers

    def count(self, state):
        return self.states.count(state)

    def lend(self, num_buffers):
        free = [buffer for buffer, state in enumerate(self.states) if state is State.FREE]
        return self.happen(Event.LEND, free[:num_buffers]) if num_buffers <= len(free) else None

    def happen(self, event, buffers):
        for buffer in buffers:
            if following(self.states[buffer], event) is None:
                raise BrokenProtocol(f"{event.value} happened to buffer {buffer}, which is {self.states[buffer].value}")
        for buffer in buffers:
            self.states[buffer] = following(self.states[buffer], event)
        return list(buffers)


def transfers_of(num_buffers):
    """Return an account of transfers that needs nothing of task 1."""
    transfers = Transfers(num_buffers)
    transfers.buffers = Ledger(num_buffers)
    return transfers


class Senders:
    """A sender that only keeps what it is told."""

    num_losses = num_away = 0

    def __init__(self, number=1):
        self.number, self.sent = number, []

    def choose(self, tokens, namespace):
        return self.number

    def send(self, sender, message):
        self.sent.append(message)

    def close(self):
        self.number = None


class StateOfText:
    """The extras of a hybrid: one buffer with what depends on all tokens of the last block, and nothing else does.

    states: by request, what is behind its last block.
    """

    num_bytes = Cells.payload_bytes

    def __init__(self, only_at_end=True):
        self.only_at_end = only_at_end
        self.states, self.reads, self.writes = {}, [], []

    def num_buffers(self, start, stop):
        return 1

    def read(self, request_id, start, stop):
        self.reads.append((request_id, start, stop))
        return [array("q", [self.states.get(request_id, 0)] * SIZE).tobytes()]

    def write(self, request_id, start, stop, buffers):
        self.writes.append((request_id, start, stop, [bytes(buffer) for buffer in buffers]))
        self.states[request_id] = array("q", bytes(buffers[-1]))[0]


class Receiver:
    """A receiving connector over `Cells`, with all that it is given."""

    def __init__(self, num_buffers=8, min_tokens=0, extras=None, num_senders=1):
        self.senders = Senders(1 if num_senders else None)
        self.transfers = transfers_of(num_buffers)
        self.stage, self.cells = stage_of(num_buffers), Cells()
        self.extras = extras or ExtraBuffers((), Cells.payload_bytes)
        self.connector = ReceivingConnector(
            self.senders, self.transfers, self.stage, self.cells, SIZE, self.extras, min_tokens
        )
        self.num_waits = 0
        self.transfers.wait = self.wait

    def wait(self, seconds):
        self.num_waits += 1
        self.while_waiting()

    def while_waiting(self):
        """What happens while the connector waits for news."""

    def matched(self, tokens, namespace=None, num_computed=0, may_wait=False):
        """Ask the connector what it has, as the manager does at each step."""
        return self.connector.get_num_new_matched_tokens(tokens, namespace, num_computed, may_wait)

    def fill(self, transfer, num_buffers, namespace=None, tokens=()):
        """Do the sender's part: fill the first buffers of a transfer and say so."""
        numbers = digests(namespace, tokens)
        for index in range(transfer.num_filled, num_buffers):
            at = (transfer.start + index) * SIZE
            self.stage.write(transfer.buffers[index], array("q", numbers[at : at + SIZE] or [0] * SIZE).tobytes())
        self.transfers.fill(transfer.sender, transfer.id, num_buffers)


class Sender:
    """A sending connector over `Cells`, and what it said; `seen` has the buffers as they were at each word."""

    def __init__(self, num_buffers=8, extras=None):
        self.stage, self.cells = stage_of(num_buffers), Cells()
        self.extras = extras or ExtraBuffers((), Cells.payload_bytes)
        self.said, self.seen = [], []
        self.connector = SendingConnector(self.stage, self.cells, SIZE, self.extras, self.say)

    def say(self, message):
        self.said.append(message)
        self.seen.append([self.buffer(number) for number in range(self.stage.num_buffers)])

    def buffer(self, number):
        """Return what is in a buffer now."""
        return array("q", bytes(self.stage.read(number))).tolist()

    def compute(self, tokens, num_blocks, first_block=1, namespace=None):
        """Put K and V of a text's first blocks into the pool, from `first_block` on. Return the blocks."""
        blocks = list(range(first_block, first_block + num_blocks))
        for index, number in enumerate(digests(namespace, tokens)[: num_blocks * SIZE]):
            self.cells.slots[first_block * SIZE + index] = number
        return blocks

    def begin(self, tokens, start, stop, buffers, transfer_id=7):
        """Begin a transfer."""
        self.connector.begin(Ask(transfer_id, array("i", tokens), None, start, stop, buffers))


def block_of(tokens, index, namespace=None):
    """Return what block `index` of a text must hold."""
    return digests(namespace, tokens)[index * SIZE : (index + 1) * SIZE]
