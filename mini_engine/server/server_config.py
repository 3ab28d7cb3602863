"""Lesson 7. The server's limits. Each one bounds something that clients could otherwise grow indefinitely."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mini_engine.base.errors import UserError

SENDABLE = re.compile(r"[\x21-\x7e]+")  # characters of one word in an HTTP header


@dataclass(frozen=True)
class ServerConfig:
    """The operator's settings.

    model_name: the model's name in the API. aliases: further names.
    api_keys: clients must send one of them; clients with different keys share no prefixes (lesson 8). If empty, no key
        is required.
    max_body_bytes: of one request, over the wire.
    header_seconds, body_seconds: time for a request's headers and for its body to arrive.
    write_seconds: time for a client to read another 16 KiB of an answer while part of it waits in the server.
    heartbeat_seconds: of silence in a stream, after which a comment is sent; None sends none.
    max_connections: open at the same time; beyond that, the one that has been silent longest is closed. If none is
        silent, the new client gets 503. The system's limit on open files may allow fewer.
    allow_origins: web pages whose scripts may use the server (CORS); "*" is any.
    allow_hosts: names allowed in clients' `Host` header; if empty, any.
    max_answers: of one request, over all its prompts and choices.
    max_prompt_logprobs: of one request, over all tokens of its prompts, their alternatives and choices.
    max_waiting: answers that may wait, over all clients; beyond that, clients get 429.
    chat_template_kwargs: more variables for chat templates, such as enable_thinking; a request's own take precedence.
    grace_seconds: from SIGTERM to the end of the process.
    step_seconds: /health returns 503 once a step takes longer.
    """

    model_name: str = "pocket"
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 2**20
    header_seconds: float = 10
    body_seconds: float = 60
    write_seconds: float = 60
    heartbeat_seconds: float | None = None
    max_connections: int = 1024
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    max_answers: int = 64
    max_prompt_logprobs: int = 2**18
    max_waiting: int = 256
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    grace_seconds: float = 30
    step_seconds: float = 60

    def __post_init__(self) -> None:
        if not all(SENDABLE.fullmatch(key) for key in self.api_keys):
            raise UserError(
                "an API key is empty or has a space or a character outside ASCII, which not every client can send; "
                "use letters, digits and punctuation"
            )
