"""Lesson 7. A server in this process, and plain ways to talk to it: sockets, and one blocking request."""

import asyncio
import functools
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import pytest

from mini_engine.engine.engine import Engine
from mini_engine.engine.loop import generate
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.engine.worker import EngineWorker
from mini_engine.kv.contiguous import CachedSequence, ContiguousKv
from mini_engine.model.causal_lm import CausalLM
from mini_engine.pocket import POCKET_DIR
from mini_engine.server.app import create_app
from mini_engine.server.background import DrainingServer, in_background
from mini_engine.server.listening import listen, url_of
from mini_engine.server.metrics import Metrics
from mini_engine.server.server_config import ServerConfig
from mini_engine.text.tokenizer import Tokenizer
from tests.support import BASE, random_model

WATCHED = ("", "uvicorn.error", "mini_engine.engine.engine", "mini_engine.engine.worker")
PATIENCE = 60.0  # seconds after which a test gives up; nothing that works takes nearly as long


LONG = pytest.mark.reference  # `make test` runs it, a check does not


class Answered(NamedTuple):
    """A response: its status, its headers by lower-case name, and its body, as JSON where it is."""

    status: int
    headers: dict[str, str]
    body: Any


def flat(lists: Iterable[list]) -> list:
    """One list of several."""
    return list(chain.from_iterable(lists))


@functools.cache
def tokenizer() -> Tokenizer:
    """The pocket model's, read once."""
    return Tokenizer(POCKET_DIR)


@functools.cache
def small_model() -> CausalLM:
    """A small random model with the pocket's vocabulary, and no end token."""
    return random_model(vocab_size=len(tokenizer().token_bytes), max_position_embeddings=512)


@functools.cache
def their_model():
    """The same as Hugging Face's. Only tests that no task needs ask for it: transformers takes seconds to import."""
    from transformers import Qwen3Config as TheirConfig
    from transformers import Qwen3ForCausalLM as TheirModel

    sizes = BASE | {"vocab_size": len(tokenizer().token_bytes), "max_position_embeddings": 512}
    theirs = TheirModel(TheirConfig(**sizes)).eval()
    theirs.load_state_dict(small_model().state_dict())
    return theirs


@functools.cache
def greedy(prompt_ids: tuple[int, ...], max_new_tokens: int) -> list[int]:
    """What the server must answer: the tokens of lesson 1's loop. `test_server` compares them with Hugging Face's."""
    model = small_model()
    kv = ContiguousKv(model.config, len(prompt_ids) + max_new_tokens)
    return generate(model, kv, CachedSequence(kv), list(prompt_ids), max_new_tokens)


class Unwritten(logging.Handler):
    """Remembers the unwritten tasks that the server ran into, in whatever thread, from what it logs."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[str] = []

    def __enter__(self) -> "Unwritten":
        for name in WATCHED:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        for name in WATCHED:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Look at the exception of a log record, and at those behind it."""
        error = record.exc_info[1] if record.exc_info else None
        while error is not None:
            if isinstance(error, NotImplementedError):
                self.met.append(str(error))
            error = error.__cause__ or error.__context__

    def as_error(self) -> NotImplementedError:
        """The first of them, to be raised in the test."""
        return NotImplementedError(self.met[0])


class Service:
    """A server around a small random model with the pocket's tokenizer. `with Service() as service:`

    Args:
        num_blocks: of 4 tokens each, the null block included.
        engine_options: more for `Engine.for_model`.
        vllm_metrics: /metrics has vLLM's names, too.
        tokens, model: others.
        config: see ServerConfig.
    """

    unwritten: Unwritten | None = None
    greedy = staticmethod(greedy)

    def __init__(
        self,
        num_blocks: int = 513,
        scheduler_config: SchedulerConfig | None = None,
        engine_options: dict[str, Any] | None = None,
        vllm_metrics: bool = False,
        tokens: Tokenizer | None = None,
        model: CausalLM | None = None,
        **config: Any,
    ) -> None:
        options = {"num_blocks": num_blocks, "block_size": 4, "scheduler_config": scheduler_config}
        self.engine = Engine.for_model(model or small_model(), **options | (engine_options or {}))
        self.config = ServerConfig("tiny", **config)
        self.metrics = Metrics(self.config.model_name if vllm_metrics else None)
        self.worker = EngineWorker(self.engine, tokens or tokenizer(), self.config.max_waiting, self.metrics)
        self.metrics.watch(self.worker)
        self.app = create_app(self.worker, self.config, self.metrics)

    def __enter__(self) -> "Service":
        self.stack = ExitStack()
        self.unwritten = self.stack.enter_context(Unwritten())
        self.stack.enter_context(self.worker)
        self.url = self.stack.enter_context(in_background(self.app))
        self.address = ("127.0.0.1", int(self.url.rsplit(":", 1)[1]))
        return self

    def __exit__(self, *exception) -> None:
        self.stack.close()

    @property
    def blocks_held(self) -> int:
        """Blocks that somebody holds now."""
        return self.engine.scheduler.manager.blocks_by_state.held

    def post(self, path: str, body: Any, **headers: str) -> Answered:
        """One request over a connection of its own; `body` is JSON, or bytes, or a list of bytes to send in chunks."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        return self.request("POST", path, data, {"Content-Type": "application/json"} | headers)

    def get(self, path: str, **headers: str) -> Answered:
        """The same, without a body."""
        return self.request("GET", path, None, headers)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a streamed answer."""
        *events, last = read_events(self.post(path, body | {"stream": True}).body)
        assert last == "[DONE]", last
        return [json.loads(event) for event in events]

    def request(self, method: str, path: str, data: bytes | list[bytes] | None, headers: dict[str, str]) -> Answered:
        """Any request. If the server ran into an unwritten task, that is raised, whatever it answered."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        try:
            connection.request(method, path, data, headers, encode_chunked=isinstance(data, list))
            response = connection.getresponse()
            content = response.read()
            is_json = content and response.headers.get_content_type() == "application/json"
            body = json.loads(content) if is_json else content.decode()
            return Answered(response.status, {k.lower(): v for k, v in response.getheaders()}, body)
        finally:
            connection.close()
            self.stop_if_unwritten()

    def dial(self, receive_buffer: int | None = None) -> socket.socket:
        """A connection on which nothing has been sent."""
        client = socket.socket()
        client.settimeout(PATIENCE)
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(self.address)
        return client

    def connect(self, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
        """A client that has asked for a completion and has not read a byte yet."""
        client = self.dial(receive_buffer)
        client.sendall(raw_request(body))
        return client

    def wait_until(self, what: str, holds) -> None:
        """Wait for something that another thread brings about."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            self.stop_if_unwritten()
            assert time.monotonic() < deadline, f"it never came about: {what}"
            time.sleep(0.005)

    def stop_if_unwritten(self) -> None:
        """Raise what the server met, if that was an unwritten task and the server is in this process."""
        if self.unwritten and self.unwritten.met:
            raise self.unwritten.as_error()

    def wait_until_idle(self) -> None:
        """Nobody waits or runs, and every block is free."""
        self.wait_until("nobody waits or runs", lambda: self.worker.num_open == 0)
        self.wait_until("every block is free", lambda: self.blocks_held == 0)


@contextmanager
def held(owner: Any, name: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Within it, calls of `owner.name` set the first event, and wait until the second one is set."""
    entered, leave, call = threading.Event(), threading.Event(), getattr(owner, name)

    def wait(*given: Any) -> Any:
        entered.set()
        assert leave.wait(PATIENCE), f"{name} was held back for ever"
        return call(*given)

    setattr(owner, name, wait)
    try:
        yield entered, leave
    finally:
        leave.set()
        setattr(owner, name, call)


def fail_once(owner: Any, name: str, error: Exception) -> None:
    """Let the next call of `owner.name` raise this error, and those after it be as they were."""
    call = getattr(owner, name)

    def fails(*given: Any) -> Any:
        setattr(owner, name, call)
        raise error

    setattr(owner, name, fails)


@asynccontextmanager
async def listening(service: Service, grace_seconds: float = PATIENCE) -> AsyncIterator[DrainingServer]:
    """Serve the service's app in this event loop, too, at what becomes its address, until a drain is over."""
    with listen("127.0.0.1", 0) as listener:
        server = DrainingServer(service.app, grace_seconds)
        service.address = ("127.0.0.1", int(url_of(listener).rsplit(":", 1)[1]))
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield server
        await asyncio.wait_for(serving, PATIENCE)


def raw_request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """An HTTP request as it goes over the wire, on a connection that ends with the response."""
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


def read_all(client: socket.socket) -> bytes:
    """What the server says until it closes the connection."""
    content = b""
    while piece := client.recv(65536):
        content += piece
    return content


def read_events(text: str) -> list[str]:
    """The data of each event in a stream, as the HTML standard reads it."""
    events, data = [], []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if line == "" and data:
            events.append("\n".join(data))
            data = []
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
    return events


def read_answer(text: str) -> dict[str, Any]:
    """A streamed completion put together: text, token_ids, finish_reason, and the usage where it was asked for."""
    *events, last = read_events(text)
    failed = '"error"' in last
    assert failed or last == "[DONE]", f"the stream ends with {last!r}; OpenAI's end with [DONE]"
    chunks = [json.loads(event) for event in (*events, *([last] if failed else []))]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    return {
        "text": "".join(choice["text"] for choice in choices),
        "token_ids": [token for choice in choices for token in choice.get("token_ids", ())],
        "finish_reason": next((choice["finish_reason"] for choice in choices if choice["finish_reason"]), None),
        "usage": next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None),
        "errors": [chunk["error"] for chunk in chunks if "error" in chunk],
    }


async def exchange(service: Service, body: dict[str, Any]) -> tuple[int, str]:
    """Ask and read it all, in an event loop: the status, and the content without its chunk sizes."""
    reader, writer = await asyncio.open_connection(*service.address)
    try:
        writer.write(raw_request(body))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        content = await asyncio.wait_for(reader.read(), PATIENCE)
    finally:
        writer.close()
    if b"chunked" in head.lower():
        content = unchunked(content)
    return int(head.split()[1]), content.decode()


def unchunked(content: bytes) -> bytes:
    """The content of a chunked transfer."""
    whole, rest = b"", content
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        whole, rest = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return whole
