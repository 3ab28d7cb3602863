"""Lesson 7. A client's request becomes jobs for the engine, and its answers a response."""

import hashlib
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from mini_engine.base.errors import TooLong
from mini_engine.engine.grammar import ANYTHING, Grammar
from mini_engine.engine.jobs import Answers, Job
from mini_engine.engine.turns import in_turn
from mini_engine.engine.worker import ModelLimits
from mini_engine.grammars.compiler import GrammarCompiler
from mini_engine.grammars.output_forms import OutputForm
from mini_engine.server.disconnect import CLIENT_CLOSED, ClientGone, unless_gone
from mini_engine.server.errors import ApiError
from mini_engine.server.middleware import TENANT
from mini_engine.server.protocol import CloseSession, Sampling
from mini_engine.server.reply import Reply
from mini_engine.server.server_config import ServerConfig
from mini_engine.server.tokenizing import PromptEncoder
from mini_engine.text.tokenizer import Tokenizer

TOO_LONG = "context_length_exceeded"  # OpenAI's code: clients that know it shorten the conversation and retry


class Backend(Protocol):
    """The engine behind the routes: lesson 6's EngineWorker, or lesson 13's replicas."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def max_waiting(self) -> int: ...
    @property
    def limits(self) -> ModelLimits: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def fault(self) -> str: ...
    @property
    def stuck(self) -> str: ...
    async def submit(self, jobs: Sequence[Job]) -> Answers: ...
    def close_session(self, session: Hashable, namespace: Hashable, /) -> Awaitable[bool]: ...
    def end_all(self, error: str) -> None: ...


Replying = Callable[[Sampling, str, Answers], Reply]


class Service:
    """Shared by all routes: the engine's worker, threads for the tokenizer and for grammars, and the limits.

    Args:
        scrape: returns the metrics as text.
    """

    def __init__(self, worker: Backend, config: ServerConfig, scrape: Callable[[], Awaitable[bytes]]) -> None:
        self.worker, self.config, self.scrape = worker, config, scrape
        self.started = int(time.time())
        self.limits, tokenizer = worker.limits, worker.tokenizer
        self.prompts = PromptEncoder(tokenizer, self.limits, config.chat_template_kwargs)
        self.turns = itertools.count()
        self.grammars = GrammarCompiler(tokenizer, self.limits.vocab_size, self.limits.eos_token_ids)

    async def answer(self, reply: Replying, wanted: Sampling, request: Request) -> Response:
        """Serve a request, whole or streamed.

        Args:
            reply: creates the reply from `wanted`, the model's name and the answers.
        """
        self.check_model(wanted.model)
        wanted = wanted.advised(self.limits.sampling)
        wanted = wanted.model_copy(update={"cache_salt": namespace(request.scope.get(TENANT), wanted.cache_salt)})
        if "stream_options" in wanted.model_fields_set and not wanted.stream:
            raise ApiError(400, "stream_options is given without stream: true; give both", param="stream_options")
        if not wanted.stream:
            try:
                body = await unless_gone(request.receive, self.whole(reply, wanted))
                return Response(body, media_type="application/json")
            except ClientGone:
                return Response(status_code=CLIENT_CLOSED)
        answers = await self.submit(wanted)
        streamed = reply(wanted, self.config.model_name, answers)
        return streamed.events(streamed.chunks(), answers.close, self.config.heartbeat_seconds)

    async def whole(self, reply: Replying, wanted: Sampling) -> str:
        """Return the body of a response that is not streamed."""
        return await reply(wanted, self.config.model_name, await self.submit(wanted)).whole()

    async def submit(self, wanted: Sampling) -> Answers:
        """Submit n jobs for each prompt, all or none."""
        count = len(wanted.prompts) * wanted.n
        most = min(self.config.max_answers, self.worker.max_waiting)  # more could never be queued, even on a retry
        if count > most:
            raise ApiError(400, f"the request asks for {count} answers; this server allows {most}")
        grammar = ANYTHING if wanted.form is None else await self.grammar_of(wanted.form)
        try:
            return await self.worker.submit(in_turn(await self.jobs(wanted, grammar), next(self.turns)))
        except TooLong as error:
            raise ApiError(400, str(error), param=error.param, code=TOO_LONG) from None

    async def jobs(self, wanted: Sampling, grammar: Grammar) -> list[Job]:
        """Return the jobs of a request: n for each prompt."""
        prompts = [await self.prompts.encode(prompt) for prompt in wanted.prompts]
        self.check_prompt_logprobs(wanted, sum(map(len, prompts)))
        params = wanted.params_of_all([self.limits.max_tokens - len(ids) for ids in prompts], grammar)
        owners = [ids for ids in prompts for _ in range(wanted.n)]
        salt, session = wanted.cache_salt, wanted.session_id
        return [Job(ids, each, salt, session=session) for ids, each in zip(owners, params, strict=True)]

    async def close_session(self, asked: CloseSession, request: Request) -> dict[str, bool]:
        """Forget a conversation of this client. If there is none, that is no error: it may have expired."""
        owner = namespace(request.scope.get(TENANT), asked.cache_salt)
        return {"closed": await self.worker.close_session(asked.session_id, owner)}

    def check_prompt_logprobs(self, wanted: Sampling, num_tokens: int) -> None:
        """Refuse a request for so many prompt log probabilities that the response would be tens of megabytes."""
        if (each := wanted.wanted_prompt_logprobs) is None:
            return
        count, most = num_tokens * wanted.n * (each + 1), self.config.max_prompt_logprobs
        if count > most:
            raise ApiError(
                400,
                f"echo with logprobs {each} asks for {count} log probabilities of {num_tokens} prompt tokens (n is "
                f"{wanted.n}); this server allows {most}, so send fewer prompts or ask for fewer logprobs",
                param="logprobs",
            )

    async def grammar_of(self, form: OutputForm) -> Grammar:
        """Return the grammar for an output form; UserError if it cannot be compiled."""
        return await self.grammars.compile(form)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for the name of a model that is not served here. No name means this one."""
        ours = self.config.model_name
        if name not in (None, ours, *self.config.aliases):
            raise ApiError(
                404, f"there is no model {name!r} here, only {ours!r}", param="model", code="model_not_found"
            )

    def model_card(self, name: str) -> dict[str, Any]:
        """Return the model's entry in /v1/models, under one of its names."""
        card = {"id": name, "object": "model", "created": self.started, "owned_by": "mini_engine"}
        return card | {"max_model_len": self.limits.max_model_len}

    async def health(self) -> JSONResponse:
        """Report whether the engine can answer: status 200 or 503."""
        trouble = self.worker.stuck if self.worker.is_alive else "the engine has stopped"
        return JSONResponse({"status": trouble or "ok"}, 503 if trouble else 200)


def namespace(tenant: str | None, salt: str | None) -> str | None:
    """Return the namespace for prefixes: different for each tenant and each salt; None without either.

    A digest, since every cached block keeps it, and clients choose the length of a salt.
    """
    if tenant is None and salt is None:
        return None
    return hashlib.sha256(json.dumps([tenant, salt]).encode()).hexdigest()
