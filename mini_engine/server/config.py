"""Lesson 7. The server's limits. Each one bounds something that a client could otherwise grow without limit."""

import re
from dataclasses import dataclass

from mini_engine.errors import UserError

SENDABLE = re.compile(r"[\x21-\x7e]+")  # what an HTTP header can hold in one word


@dataclass(frozen=True)
class ServerConfig:
    """What the operator decides.

    model_name: what clients call the model.
    api_key: what clients must send; None requires nothing.
    max_body_bytes: of one request.
    header_seconds, body_seconds: for a request's headers and for its body to arrive.
    max_connections: open at the same time; beyond that, clients get 503. The system's limit on files may allow fewer.
    allow_origins: web pages whose scripts may use the server (CORS); "*" is any.
    max_answers: of one request, over all its prompts and choices.
    max_waiting: answers that may wait for their turn, over all clients; beyond that, clients get 429.
    grace_seconds: from SIGTERM to the end of the process.
    """

    model_name: str = "pocket"
    api_key: str | None = None
    max_body_bytes: int = 2**20
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    max_connections: int = 1024
    allow_origins: tuple[str, ...] = ()
    max_answers: int = 64
    max_waiting: int = 256
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.api_key is not None and not SENDABLE.fullmatch(self.api_key):
            raise UserError(
                "the API key is empty or has a space or a letter outside ASCII, so not every client could send it; "
                "use letters, digits and signs"
            )
