"""Course machinery. Lesson 19's trace: prompts computed elsewhere, a cancel, and a worker's death."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from scripts.traces.sharing import Letters
from scripts.traces.tape import Tape, ask, plural

from mini_engine.handover.extras import ExtraBuffers
from mini_engine.handover.protocol import Ask, Cancel, Ended, Filled
from mini_engine.handover.receiver import ReceivingConnector
from mini_engine.handover.sender import SendingConnector
from mini_engine.handover.stage import Stage, State
from mini_engine.handover.transfers import Transfers
from mini_engine.kv.cache_coordinator import coordinated
from mini_engine.kv.prefix_cache import PrefixCache

BLOCK_SIZE, NUM_BLOCKS, NUM_BUFFERS, CHUNK = 4, 16, 8, 8
PROMPTS = {"A": "The sea is very deep.", "B": "Bread is best when warm.", "D": "Dogs like long walks."}
ANSWER = "Cats sleep for most of a day."  # C's: a letter a step
STAGE = "mini_engine/handover/stage.py::Buffers"
SENDER = "mini_engine/handover/sender.py::SendingConnector"
RECEIVER = "mini_engine/handover/receiver.py::ReceivingConnector"
TRANSFERS = "mini_engine/handover/transfers.py::Transfers"


@dataclass(eq=False)
class Request:
    """A request as a connector knows it."""

    id: str
    namespace: Hashable
    token_ids: Sequence[int]
    session: Hashable = None


class Worker:
    """A prefill worker in this process: its manager, its connector, and its unread messages."""

    def __init__(self, stage: Stage, number: int, say) -> None:
        letters: Any = Letters(NUM_BLOCKS, BLOCK_SIZE)
        self.number, self.letters, self.inbox = number, letters, deque[Ask | Cancel]()
        self.connector = SendingConnector(stage, letters, BLOCK_SIZE, ExtraBuffers((), BLOCK_SIZE), say)
        self.manager = coordinated(NUM_BLOCKS, BLOCK_SIZE, letters.copy, prefixes=PrefixCache, connector=self.connector)
        self.ask: Ask | None = None
        self.num_computed = 0

    def hear(self) -> None:
        """Read the next message."""
        message = self.inbox.popleft()
        if isinstance(message, Ask):
            self.ask, name = message, str(message.id)
            self.connector.begin(message)
            self.num_computed = self.manager.allocate(name, list(message.tokens))
        else:
            self.end("cancelled")

    def compute(self) -> None:
        """Compute a chunk. After the last one, the transfer ends."""
        assert self.ask is not None
        ids, name = list(self.ask.tokens), str(self.ask.id)
        stop = min(self.num_computed + CHUNK, len(ids))
        self.manager.grow(name, stop)
        for index, block in enumerate(self.manager.tables[name].blocks):
            self.letters.blocks[block] = bytes(ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
        self.num_computed = stop
        self.manager.commit(name, ids, stop)
        if stop == len(ids):
            self.end()

    def end(self, error: str = "") -> None:
        """Stop writing to the buffers, and report it."""
        assert self.ask is not None
        self.manager.free(str(self.ask.id))
        self.connector.end(self.ask.id, error)
        self.ask = None


class Handover(Tape):
    """A receiver that decodes C, and workers that compute the prompts of A, B and D.

    said: the last message. ran: the part of a prompt that the worker has computed. owner of a buffer: the request.
    """

    num_losses = num_away = 0

    def __init__(self) -> None:
        scene = {"block_size": BLOCK_SIZE, "prompts": PROMPTS}
        super().__init__(
            "l19-handover", "l19_handover/handover.trace.js", "handover", "Prefill here, decode there", 3, **scene
        )
        memory: Any = SimpleNamespace(buffer=memoryview(bytearray(NUM_BUFFERS * BLOCK_SIZE)))
        self.stage, self.transfers = Stage(memory, NUM_BUFFERS, BLOCK_SIZE), Transfers(NUM_BUFFERS)
        self.said, self.waiting, self.num_decoded = "", "", 1
        self.worker = Worker(self.stage, 1, self.hear)
        letters: Any = Letters(NUM_BLOCKS, BLOCK_SIZE)
        self.letters, self.requests = letters, dict[str, Request]()
        self.connector = ReceivingConnector(
            self, self.transfers, self.stage, letters, BLOCK_SIZE, ExtraBuffers((), BLOCK_SIZE), 1
        )
        self.manager = coordinated(NUM_BLOCKS, BLOCK_SIZE, letters.copy, prefixes=PrefixCache, connector=self.connector)
        self.owners = dict[int, str]()
        self.is_dead = False

    # ---------------------------------------------------------------- the senders, as the connector sees them

    def choose(self, tokens, namespace) -> int | None:
        """Choose the only worker."""
        return None if self.is_dead else self.worker.number

    def send(self, sender: int, message: Ask | Cancel) -> None:
        """Put a message into the worker's pipe. It is read later."""
        self.worker.inbox.append(message)
        self.said = f"Ask: {plural(len(message.buffers), 'buffer')}" if isinstance(message, Ask) else "Cancel"

    def close(self) -> None:
        """Do nothing: there is no process."""

    def hear(self, message: Filled | Ended) -> None:
        """Carry out the worker's message."""
        if isinstance(message, Filled):
            self.transfers.fill(self.worker.number, message.id, message.num_buffers)
            self.said = f"Filled: {message.num_buffers}"
        else:
            self.transfers.end(self.worker.number, message.id, message.error)
            self.said += ", Ended" if self.said.startswith("Filled") else "Ended"

    # ---------------------------------------------------------------- frames

    def state(self) -> dict[str, Any]:
        for transfer in self.transfers.of_id.values():
            self.owners |= dict.fromkeys(transfer.buffers, self.waiting) if self.waiting and not transfer.owed else {}
        buffers = []
        for index, state in enumerate(self.transfers.buffers.states):
            text = bytes(self.stage.read(index)).decode() if state is State.FILLED else ""
            owner = "" if state is State.FREE else self.owners.get(index, "")
            buffers.append({"state": state.value, "text": text, "owner": owner})
        tables = {}
        for name, table in self.manager.tables.items():
            tables[name] = [self.letters.blocks[block].decode().ljust(BLOCK_SIZE) for block in table.blocks]
        ask = self.worker.ask
        prompt = bytes(list(ask.tokens)).decode() if ask else ""
        computed = self.worker.num_computed if ask else 0
        return {
            "buffers": buffers,
            "said": self.said,
            "waiting": self.waiting,
            "tables": tables,
            "answer": ANSWER[: self.num_decoded],
            "worker": {"number": self.worker.number, "prompt": prompt, "computed": computed, "dead": self.is_dead},
        }

    def free(self) -> int:
        return self.transfers.buffers.count(State.FREE)

    def decode(self) -> None:
        """Decode one more token for C."""
        self.num_decoded += 1
        ids = list(ANSWER[: self.num_decoded].encode())
        self.manager.grow("C", len(ids))
        self.put("C", ids)
        self.said = ""

    def put(self, name: str, ids: list[int]) -> None:
        for index, block in enumerate(self.manager.tables[name].blocks):
            self.letters.blocks[block] = bytes(ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])

    def arrive(self, name: str) -> list[int]:
        """Add a request to the queue; the scheduler asks for its cost. Return its tokens."""
        ids, self.waiting = list(PROMPTS[name].encode()), name
        one = self.requests[name] = Request(id=name, namespace=None, token_ids=ids)
        self.connector.request_added(one)
        self.manager.cost(ids, len(ids))
        self.worker.hear()
        return ids

    def chunk(self) -> None:
        """Let C decode, and the worker compute a chunk meanwhile."""
        self.decode()
        self.worker.compute()

    def record(self) -> None:
        """Show a hand-over, a cancel and a death."""
        self.manager.allocate("C", list(b"C"))
        self.manager.grow("C", 1)
        self.put("C", list(b"C"))
        self.show(
            f"The receiver decodes C. A worker is idle, with {NUM_BUFFERS} buffers of {BLOCK_SIZE} letters in memory "
            "that both see.",
            STAGE,
        )
        self.whole()
        self.cancelled()
        self.lost()

    def whole(self) -> None:
        """Show a prompt that is handed over chunk by chunk."""
        ids = self.arrive("A")
        num_lent = NUM_BUFFERS - self.free()
        why = f"{num_lent} blocks of {BLOCK_SIZE}. The last token's logits are needed here, so it is computed here."
        question = ask(
            f"A has {len(ids)} tokens. How many of them will the worker hand over?",
            num_lent * BLOCK_SIZE,
            (16, 21, 24),
            why,
        )
        self.show(
            f"A arrives and stays in the queue. {num_lent} buffers are lent, and the worker is asked for A.",
            f"{RECEIVER}.get_num_new_matched_tokens",
            question,
        )
        while self.worker.ask:
            self.chunk()
            if self.worker.ask is None:
                said = f"The last chunk. {self.said.partition(',')[0]} of {num_lent}; the worker writes no more."
            else:
                said = f"The worker has computed {self.worker.num_computed} tokens of A and copied their blocks."
            self.show(said, f"{SENDER}._copy")
        self.take("A", ids, f"{TRANSFERS}.take")

    def take(self, name: str, ids: list[int], code: str) -> None:
        """Admit a request after the arrived tokens, and compute the rest here."""
        self.decode()
        match = self.manager.cost(ids, len(ids))
        if match.should_wait:
            raise ValueError(f"{name} waits, though nothing of it is on its way")
        found, self.waiting = self.manager.allocate(name, ids), ""
        self.show(
            f"{name} is admitted: {found} tokens are copied into the pool, {len(ids) - found} of {len(ids)} will be "
            "computed here.",
            code,
        )
        self.manager.free(name)

    def cancelled(self) -> None:
        """Show a request that ends while its prompt is in transit."""
        self.arrive("B")
        self.chunk()
        filled = self.transfers.buffers.count(State.FILLED)
        self.show(
            f"B arrives. The worker has filled {filled} of its buffers when B's client disconnects.", f"{SENDER}._copy"
        )
        self.said = ""
        before = self.free()
        self.connector.request_finished("B")
        self.waiting = ""
        why = "The complete ones are the receiver's. The worker may be writing into the others now."
        self.show(
            f"B is gone. {plural(self.free() - before, 'buffer')} came back; "
            f"{self.transfers.buffers.count(State.OWED)} are owed, and nothing may use them yet.",
            f"{TRANSFERS}.cancel",
            ask(
                f"B is cancelled. How many of the {NUM_BUFFERS} buffers are free now?",
                self.free(),
                (before, NUM_BUFFERS),
                why,
            ),
        )
        self.decode()
        self.worker.hear()
        self.show("The worker has read the cancel and writes no more. All buffers are free.", f"{TRANSFERS}.end")

    def lost(self) -> None:
        """Show a worker that falls silent."""
        ids = self.arrive("D")
        self.chunk()
        self.show("D arrives, and the first chunk is there. Then the worker gives no sign of life.", f"{SENDER}._copy")
        self.decode()
        self.is_dead = True
        why = "It may only be slow. If it woke up, it would write into buffers that belong to another request by then."
        lent = self.transfers.buffers.count(State.LENT)
        self.show(
            f"The worker is killed. Until the system says that it is gone, the {lent} lent buffers stay lent.",
            f"{TRANSFERS}.fill",
            ask(
                "The worker is silent. What comes first?", "kill it", ("free its buffers", "wait a minute longer"), why
            ),
        )
        self.decode()
        self.transfers.lose(self.worker.number, "is gone")
        self.show(
            f"It is gone, so nothing writes any more: {lent} buffers are free. What was filled is complete.",
            f"{TRANSFERS}.lose",
        )
        self.worker = Worker(self.stage, 2, self.hear)
        self.is_dead = False
        self.take("D", ids, f"{RECEIVER}._usable")
