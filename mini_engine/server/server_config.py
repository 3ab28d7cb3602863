"""Lesson 7. The server's limits. Each one bounds something that a client could otherwise grow without limit."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mini_engine.errors import UserError

SENDABLE = re.compile(r"[\x21-\x7e]+")  # what an HTTP header can hold in one word


@dataclass(frozen=True)
class ServerConfig:
    """What the operator decides.

    model_name: what clients call the model. aliases: what else they may call it.
    api_keys: what clients must send, any one of them; clients of different keys share no prefixes (lesson 8). None
        requires nothing.
    max_body_bytes: of one request, as it comes over the wire.
    header_seconds, body_seconds: for a request's headers and for its body to arrive.
    write_seconds: for a client to read another 16 KiB of an answer, if more of it waits than asyncio likes to hold.
    heartbeat_seconds: of silence in a stream, after which a comment is sent; None sends none.
    max_connections: open at the same time; beyond that, the one that has been silent longest is closed. If none is
        silent, the client gets 503. The system's limit on files may allow fewer.
    allow_origins: web pages whose scripts may use the server (CORS); "*" is any.
    allow_hosts: names by which clients may call this server, as in their `Host` header; none given, any.
    max_answers: of one request, over all its prompts and choices.
    max_prompt_logprobs: of one request, over all tokens of its prompts, their alternatives and choices.
    max_waiting: answers that may wait for their turn, over all clients; beyond that, clients get 429.
    chat_template_kwargs: more names for chat templates, such as enable_thinking; a request's own come first.
    grace_seconds: from SIGTERM to the end of the process.
    """

    model_name: str = "pocket"
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 2**20
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    heartbeat_seconds: float | None = None
    max_connections: int = 1024
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    max_answers: int = 64
    max_prompt_logprobs: int = 2**18
    max_waiting: int = 256
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not all(SENDABLE.fullmatch(key) for key in self.api_keys):
            raise UserError(
                "an API key is empty or has a space or a letter outside ASCII, so not every client could send it; "
                "use letters, digits and signs"
            )
