"""Lesson 7. The routes: a client's request becomes jobs for the engine, and its answers a response."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from mini_engine.engine.answers import Answers, Job
from mini_engine.engine.worker import EngineWorker
from mini_engine.errors import UserError
from mini_engine.server.answers import Reply
from mini_engine.server.config import ServerConfig
from mini_engine.server.disconnect import ClientGone, unless_gone
from mini_engine.server.errors import ApiError, install_handlers
from mini_engine.server.metrics import Metrics
from mini_engine.server.middleware import ApiKey, BodyLimit, Drain
from mini_engine.server.protocol import ChatRequest, CompletionRequest, Prompt, Sampling
from mini_engine.server.response_formats import ChatFormat, CompletionFormat, ResponseFormat
from mini_engine.server.sse import EventStream

CLIENT_CLOSED = 499  # nginx's status for it; no client is left to see it
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is invalid; the message says why, `param` says where."},
    401: {"description": "The API key is missing or wrong."},
    404: {"description": "There is no such model."},
    413: {"description": "The body is too large."},
    429: {"description": "Too many requests are waiting; come back after `Retry-After` seconds."},
    500: {"description": "The engine failed."},
    503: {"description": "The server is shutting down."},
}


class Service:
    """What the routes share: the engine's worker, a thread for the tokenizer, and the limits."""

    def __init__(self, worker: EngineWorker, config: ServerConfig, metrics: Metrics) -> None:
        self.worker, self.config, self.metrics = worker, config, metrics
        self.started = int(time.time())
        self.tokenizing = ThreadPoolExecutor(1, "tokenizer")  # one thread: the tokenizer is not made for concurrent use
        engine, tokenizer = worker.engine, worker.tokenizer
        manager = engine.scheduler.manager
        self.max_tokens = min(engine.config.max_position_embeddings, manager.num_usable_blocks * manager.block_size + 1)
        self.max_characters = engine.config.max_position_embeddings * max(map(len, tokenizer.token_bytes))

    async def answer(self, response_format: ResponseFormat, wanted: Sampling, request: Request) -> Response:
        """Serve a completion or a chat, whole or streamed."""
        self.check_model(wanted.model)
        if wanted.stream_options is not None and not wanted.stream:
            raise ApiError(400, "stream_options is given without stream: true; give both", param="stream_options")
        if not wanted.stream:
            try:
                return JSONResponse(await unless_gone(request.receive, self.whole(response_format, wanted)))
            except ClientGone:
                return Response(status_code=CLIENT_CLOSED)
        answers = await self.submit(wanted)
        return EventStream(self.reply(response_format, wanted, answers).chunks(), answers.close)

    async def whole(self, response_format: ResponseFormat, wanted: Sampling) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        return await self.reply(response_format, wanted, await self.submit(wanted)).whole()

    def reply(self, response_format: ResponseFormat, wanted: Sampling, answers: Answers) -> Reply:
        """The answers in their response format."""
        return Reply(response_format, wanted, self.config.model_name, answers)

    async def submit(self, wanted: Sampling) -> Answers:
        """Submit n jobs for each prompt, all or none."""
        count = len(wanted.prompts) * wanted.n
        most = min(self.config.max_answers, self.worker.max_waiting)  # more could never be queued: a retry is no use
        if count > most:
            raise ApiError(400, f"{count} answers are asked for at once; this server gives {most}")
        prompts = [await self.encode(prompt) for prompt in wanted.prompts]
        jobs = [
            Job(prompt_ids, wanted.params(choice, self.max_tokens - len(prompt_ids)), wanted.cache_salt)
            for prompt_ids in prompts
            for choice in range(wanted.n)
        ]
        return await self.worker.submit(jobs)

    async def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a text or a conversation, or ids as given. A prompt that is far too long is not tokenized."""
        tokenizer = self.worker.tokenizer
        if isinstance(prompt, str):
            return await self.tokenize(len(prompt), partial(tokenizer.encode, prompt))
        if messages := [message for message in prompt if isinstance(message, dict)]:
            size = sum(len(message["content"]) for message in messages)
            return await self.tokenize(size, partial(tokenizer.encode_chat, messages))
        return [token_id for token_id in prompt if isinstance(token_id, int)]

    async def tokenize(self, size: int, work: Callable[[], list[int]]) -> list[int]:
        """Do `work`, which tokenizes `size` characters, in the tokenizer's thread."""
        if size > self.max_characters:
            raise UserError(
                f"the prompt has {size} characters, too many for the model's "
                f"{self.worker.engine.config.max_position_embeddings} positions; shorten it"
            )
        return await asyncio.get_running_loop().run_in_executor(self.tokenizing, work)

    def check_model(self, name: str | None) -> None:
        """Refuse the name of a model that is not served here. No name means this one."""
        ours = self.config.model_name
        if name not in (None, ours):
            raise ApiError(
                404, f"there is no model {name!r} here, only {ours!r}", param="model", code="model_not_found"
            )

    def model_card(self) -> dict[str, Any]:
        """The model as an entry of /v1/models."""
        positions = self.worker.engine.config.max_position_embeddings
        card = {"id": self.config.model_name, "object": "model", "created": self.started, "owned_by": "mini_engine"}
        return card | {"max_model_len": positions}


def create_app(worker: EngineWorker, config: ServerConfig, metrics: Metrics) -> Drain:
    """The app behind its middleware; `begin()` on it starts the drain."""
    app = FastAPI(title="mini_engine", summary="A course's LLM server, with OpenAI's routes.", redoc_url=None)
    install_handlers(app)
    add_routes(app, Service(worker, config, metrics))
    return Drain(ApiKey(BodyLimit(app, config.max_body_bytes), config.api_key))


def add_routes(app: FastAPI, service: Service) -> None:
    """Register every route."""

    @app.post("/v1/completions", responses=ERRORS)
    async def completions(wanted: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts."""
        return await service.answer(CompletionFormat(), wanted, request)

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat(wanted: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await service.answer(ChatFormat(), wanted, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model served here."""
        return {"object": "list", "data": [service.model_card()]}

    @app.get("/v1/models/{name:path}", responses={404: ERRORS[404]})
    async def model(name: str) -> dict[str, Any]:
        """Describe a model by its name."""
        service.check_model(name)
        return service.model_card()

    @app.get("/health", responses={503: {"description": "The engine's thread has ended."}})
    async def health() -> JSONResponse:
        """Report whether the engine's thread is alive."""
        alive = service.worker.is_alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")
