"""Course machinery. Lesson 7's server on a stage: its app, its engine thread, and three clients, one of them slow.

The app and the thread are the server's own. Two things are scripted, so that every recording is the same: the thread
runs one round when it is told to, and a slow client's socket holds one event until the client reads it.
"""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from scripts.traces.tape import plural

from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.engine.worker import EngineWorker
from mini_engine.model.causal_lm import CausalLM
from mini_engine.text.tokenizer import Tokenizer

NUM_BLOCKS, BLOCK_SIZE = 13, 4
PROMPTS = {"A": "The capital of France is", "B": "Once upon a time", "C": "Count: one, two, three,"}
LENGTHS = {"A": 9, "B": 8, "C": 12}
SLOW = "C"
PATIENCE = 60.0  # seconds for one round of the engine's thread; a round takes milliseconds
PAUSE = 0.02  # seconds between rounds: longer than three readers' wake-up interval, so each round may wake each reader


class Gate(threading.Condition):
    """The condition that the engine's thread waits on, here also for its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0.0
        self.parked = False

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> bool:
        """Wait, in the engine's thread, for a turn and for something to do."""
        self.parked = True
        self.notify_all()
        super().wait_for(lambda: self.turns and predicate())
        self.parked = False
        self.turns -= 1
        return True

    def turn(self) -> None:
        """Let the engine's thread run one round: its inbox, then a step."""
        time.sleep(PAUSE)
        with self:
            self.turns += 1
            self.notify_all()
            if not super().wait_for(lambda: self.parked and not self.turns, PATIENCE):
                raise TimeoutError(f"the engine's thread has not finished its round after {PATIENCE:g} s")

    def let_all_through(self) -> None:
        """Let the engine thread run freely, so that it can end."""
        with self:
            self.turns = math.inf
            self.notify_all()


class Client:
    """One ASGI connection. Events are lists of token numbers.

    events: those that the client has read. unread: the one that is still in its socket, for which `send` waits.
    """

    def __init__(self, name: str, body: bytes) -> None:
        self.name, self.body = name, body
        self.events: list[int] = []
        self.unread = 0
        self.reads, self.leaves = asyncio.Event(), asyncio.Event()
        self.sent_body = False
        self.status = "asks"

    @property
    def scope(self) -> dict[str, Any]:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self.body)).encode())]
        address = {"path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "", "query_string": b""}
        return {"type": "http", "method": "POST", "http_version": "1.1", "scheme": "http", "headers": headers} | address

    async def receive(self) -> dict[str, Any]:
        if not self.sent_body:
            self.sent_body = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message) -> None:
        """Take an event. A slow client's `send` returns when the client has read it."""
        self.unread = num_tokens(message.get("body", b""))
        if self.unread and self.name == SLOW:
            self.status = "slow"
            self.reads.clear()
            await self.reads.wait()
        self.status = "reads"
        if self.unread:
            self.events.append(self.unread)
        self.unread = 0


def num_tokens(body: bytes) -> int:
    """Return the number of tokens in an event; 0 for [DONE] and for anything else."""
    text = body.decode("utf-8").removeprefix("data: ").strip()
    if not text or text == "[DONE]":
        return 0
    return sum(len(choice["token_ids"]) for choice in json.loads(text)["choices"])


class Stage:
    """The app with its engine's thread, and three clients. `async with` starts the thread and ends everything."""

    def __init__(self, model: CausalLM, tokenizer: Tokenizer) -> None:
        from mini_engine.server.app import create_app  # here, because the server is an extra
        from mini_engine.server.metrics import Metrics
        from mini_engine.server.server_config import ServerConfig

        self.tokenizer = tokenizer
        self.engine = Engine.for_model(
            model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kernel="reference",
            scheduler_config=SchedulerConfig(watermark=0),
        )  # fmt: skip
        metrics = Metrics()
        self.worker = EngineWorker(self.engine, self.tokenizer, observer=metrics)
        self.gate = self.worker._changed = Gate()
        self.app = create_app(self.worker, ServerConfig(), metrics)
        self.clients = {name: Client(name, self.body_of(name)) for name in PROMPTS}
        self.names: dict[str, str] = {}  # a request's id to its client
        self.mailboxes: dict[str, Any] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.made: list[str] = []  # the clients whose answers got a token in the last round
        self.steps = 0

    def body_of(self, name: str) -> bytes:
        prompt = self.tokenizer.encode(PROMPTS[name])  # as ids: no other thread takes part
        wanted = {"prompt": prompt, "max_tokens": LENGTHS[name], "temperature": 0, "stream": True}
        return json.dumps(wanted | {"ignore_eos": True, "return_token_ids": True}).encode()

    async def __aenter__(self) -> "Stage":
        self.worker.__enter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.gate.let_all_through()
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.worker.close()

    async def settle(self) -> None:
        """Let the event loop run until it has nothing to do but wait."""
        for _ in range(100):
            await asyncio.sleep(0)
        for name, task in self.tasks.items():
            if task.done():
                task.result()  # raises the app's exception
                self.clients[name].status = "gone" if self.clients[name].leaves.is_set() else "done"

    async def arrive(self) -> None:
        """Let every client ask, and wait until all jobs are in the inbox."""
        self.tasks = {
            name: asyncio.create_task(self.app(client.scope, client.receive, client.send))
            for name, client in self.clients.items()
        }
        await self.settle()
        ids = [command.args[0].ids[0] for command in self.worker._inbox]
        if len(ids) != len(PROMPTS):
            raise RuntimeError(f"{plural(len(PROMPTS), 'client')} asked, and {plural(len(ids), 'job')} came")
        self.names = dict(zip(ids, PROMPTS, strict=True))

    @property
    def inbox(self) -> list[list[str]]:
        """Return the engine thread's pending work: "job" or "abort", with the client."""
        found = []
        for command in self.worker._inbox:
            is_abort = command.func == self.worker._abort
            ids = command.args[0] if is_abort else command.args[0].ids
            found += [["abort" if is_abort else "job", self.names[request_id]] for request_id in ids]
        return found

    def step(self) -> None:
        """Let the engine's thread run one round."""
        before = self.computed()
        self.gate.turn()
        self.steps += 1
        self.mailboxes |= {self.names[key]: answer.mailbox for key, answer in self.worker.answers.items()}
        self.made = [name for name, count in self.computed().items() if count > before.get(name, 0)]

    def computed(self) -> dict[str, int]:
        """Return the number of tokens in each client's answer."""
        return {name: sum(client.events) + client.unread + self.waiting(name) for name, client in self.clients.items()}

    def waiting(self, name: str) -> int:
        """Return the number of tokens that wait in a client's mailbox."""
        mailbox = self.mailboxes.get(name)
        return sum(len(delta.token_ids) for _, delta in mailbox.waiting) if mailbox else 0

    def held(self) -> dict[str, int]:
        """Return the number of blocks that each request holds."""
        tables = self.engine.scheduler.manager.tables
        return {self.names[key]: len(table.blocks) for key, table in tables.items()}

    def state(self) -> dict[str, Any]:
        """Return the state for a frame."""
        clients = [
            {"read": list(client.events), "unread": client.unread, "waits": self.waiting(name), "status": client.status}
            for name, client in self.clients.items()
        ]
        state = {"step": self.steps, "inbox": self.inbox, "held": self.held()}
        return state | {"clients": clients, "computed": list(self.computed().values())}
