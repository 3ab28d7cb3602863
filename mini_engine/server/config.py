"""Lesson 7. The server's limits. Each one bounds something that a client could otherwise grow without limit."""

from dataclasses import dataclass

from mini_engine.errors import UserError


@dataclass(frozen=True)
class ServerConfig:
    """What the operator decides.

    model_name: what clients call the model.
    api_key: what clients must send; None requires nothing.
    max_body_bytes: of one request.
    max_answers: of one request, over all its prompts and choices.
    max_waiting: answers that may wait for their turn, over all clients; beyond that, clients get 429.
    grace_seconds: from SIGTERM to the end of the process.
    """

    model_name: str = "pocket"
    api_key: str | None = None
    max_body_bytes: int = 2**20
    max_answers: int = 64
    max_waiting: int = 256
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise UserError(
                "the API key is empty or begins or ends with a space, so no client could send it; use another"
            )
