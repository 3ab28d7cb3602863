"""Lesson 7. The routes: a client's request becomes jobs for the engine, and its answers a response."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from mini_engine.engine.answers import Answers, Job
from mini_engine.engine.grammar import ANYTHING, Grammar
from mini_engine.engine.worker import EngineWorker, ModelLimits
from mini_engine.errors import UserError
from mini_engine.server.answers import Reply, to_json
from mini_engine.server.bodies import BodyReader
from mini_engine.server.config import ServerConfig
from mini_engine.server.disconnect import ClientGone, unless_gone
from mini_engine.server.errors import ApiError, install_handlers
from mini_engine.server.grammars import GrammarCompiler
from mini_engine.server.metrics import Metrics
from mini_engine.server.middleware import ApiKey, BodyLimit, Drain, RequestId
from mini_engine.server.output_forms import OutputForm
from mini_engine.server.protocol import ChatRequest, CompletionRequest, Conversation, Prompt, Sampling
from mini_engine.server.response_formats import ChatFormat, CompletionFormat, ResponseFormat
from mini_engine.server.sse import EventStream
from mini_engine.server.tool_calls import ToolChatFormat
from mini_engine.tokenizer import Tokenizer

CLIENT_CLOSED = 499  # nginx's status for it; no client is left to see it
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is invalid; the message says why, `param` says where."},
    401: {"description": "The API key is missing or wrong."},
    404: {"description": "There is no such model."},
    408: {"description": "The body did not arrive in time."},
    413: {"description": "The body is too large."},
    429: {"description": "Too many requests are waiting; come back after `Retry-After` seconds."},
    500: {"description": "The engine failed."},
    503: {"description": "The server is shutting down."},
}


class Backend(Protocol):
    """What answers jobs: lesson 6's EngineWorker, or lesson 13's replicas."""

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
    async def submit(self, jobs: Sequence[Job]) -> Answers: ...
    def end_all(self, error: str) -> None: ...


class Scraped(Protocol):
    """Metrics, by what the routes need of them."""

    async def scrape(self) -> bytes: ...


class Service:
    """What the routes share: the engine's worker, threads for the tokenizer, bodies and grammars, and the limits."""

    def __init__(self, worker: Backend, config: ServerConfig, metrics: Scraped) -> None:
        self.worker, self.config, self.metrics = worker, config, metrics
        self.started = int(time.time())
        self.bodies = BodyReader()
        self.tokenizing = ThreadPoolExecutor(1, "tokenizer")  # one thread: the tokenizer is not made for concurrent use
        self.limits, tokenizer = worker.limits, worker.tokenizer
        self.grammars = GrammarCompiler(tokenizer, self.limits.vocab_size, self.limits.eos_token_ids)
        self.max_characters = self.limits.max_model_len * max(map(len, tokenizer.token_bytes))

    async def answer(self, response_format: ResponseFormat, wanted: Sampling, request: Request) -> Response:
        """Serve a completion or a chat, whole or streamed."""
        self.check_model(wanted.model)
        if wanted.stream_options is not None and not wanted.stream:
            raise ApiError(400, "stream_options is given without stream: true; give both", param="stream_options")
        if not wanted.stream:
            try:
                body = await unless_gone(request.receive, self.whole(response_format, wanted))
                return Response(to_json(body), media_type="application/json")
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
        grammar = ANYTHING if wanted.form is None else await self.grammar_of(wanted.form)
        prompts = [await self.encode(prompt) for prompt in wanted.prompts]
        jobs = [
            Job(prompt_ids, wanted.params(choice, self.limits.max_tokens - len(prompt_ids), grammar), wanted.cache_salt)
            for prompt_ids in prompts
            for choice in range(wanted.n)
        ]
        return await self.worker.submit(jobs)

    async def grammar_of(self, form: OutputForm) -> Grammar:
        """The grammar of a form; UserError if there is none."""
        return await self.grammars.compile(form)

    async def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a text or a conversation, or ids as given. A prompt that is far too long is not tokenized."""
        tokenizer = self.worker.tokenizer
        if isinstance(prompt, Conversation):
            size = sum(len(message["content"]) for message in prompt.messages)
            return await self.tokenize(size, partial(tokenizer.encode_chat, prompt.messages, prompt.tools))
        if isinstance(prompt, str):
            prompt = await self.tokenize(len(prompt), partial(tokenizer.encode, prompt))
        if not prompt:
            raise UserError("the prompt is empty; give at least one token", param="prompt")
        return prompt

    async def tokenize(self, size: int, work: Callable[[], list[int]]) -> list[int]:
        """Do `work`, which tokenizes `size` characters, in the tokenizer's thread."""
        if size > self.max_characters:
            raise UserError(
                f"the prompt has {size} characters, too many for the model's "
                f"{self.limits.max_model_len} positions; shorten it"
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
        card = {"id": self.config.model_name, "object": "model", "created": self.started, "owned_by": "mini_engine"}
        return card | {"max_model_len": self.limits.max_model_len}

    async def health(self) -> JSONResponse:
        """Whether answers can be expected, with status 200 or 503."""
        alive = self.worker.is_alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)


class ServerApp:
    """The routes behind their middleware, as uvicorn runs them.

    Attributes:
        drain: counts the requests in flight and refuses new ones at the end.
        cut: ends all answers with an error, when the grace is over.
    """

    def __init__(self, service: Service) -> None:
        routes = FastAPI(title="mini_engine", summary="A course's LLM server, with OpenAI's routes.", redoc_url=None)
        install_handlers(routes)
        add_routes(routes, service)
        describe_bodies(routes, CompletionRequest, ChatRequest)
        self.config, self.worker = service.config, service.worker
        self.drain = Drain(routes)
        self.outermost = behind(self.drain, service.config)
        self.cut = partial(service.worker.end_all, "the server is shutting down")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What ASGI calls."""
        try:
            await self.outermost(scope, receive, send)
        except asyncio.CancelledError:
            if not self.drain.draining:
                raise  # otherwise uvicorn has cut off what was left, and there is nothing more to say


def create_app(worker: EngineWorker, config: ServerConfig, metrics: Metrics) -> ServerApp:
    """The app behind its middleware."""
    return ServerApp(Service(worker, config, metrics))


def behind(drain: Drain, config: ServerConfig) -> ASGIApp:
    """The middleware in front of the drain. A request is in flight once it has arrived in full."""
    app: ASGIApp = BodyLimit(drain, config.max_body_bytes, config.body_seconds)
    app = ApiKey(app, config.api_key)
    if config.allow_origins:
        app = CORSMiddleware(app, config.allow_origins, allow_methods=["*"], allow_headers=["*"])
    return RequestId(app)


def describe_bodies(app: FastAPI, *models: type[BaseModel]) -> None:
    """Add the bodies to /openapi.json: the routes read them by hand, so FastAPI does not know them."""
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    made = app.openapi

    def openapi() -> dict[str, Any]:
        description = made()
        description.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return description

    app.openapi = openapi


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """The description of a route's body."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_routes(app: FastAPI, service: Service) -> None:
    """Register every route."""
    add_answers(app, service)
    add_facts(app, service)


def add_answers(app: FastAPI, service: Service) -> None:
    """Register the routes that run the model, and refuse the one that clients expect and this server lacks."""

    @app.post("/v1/completions", responses=ERRORS, openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        wanted = await service.bodies.read(request, CompletionRequest)
        return await service.answer(CompletionFormat(), wanted, request)

    @app.post("/v1/chat/completions", responses=ERRORS, openapi_extra=takes(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        wanted = await service.bodies.read(request, ChatRequest)
        shape = ToolChatFormat() if wanted.form is not None and wanted.form.functions else ChatFormat()
        return await service.answer(shape, wanted, request)

    @app.post("/v1/responses", responses={404: ERRORS[404]})
    async def responses() -> Response:
        """Refuse OpenAI's Responses API, which this server does not have."""
        raise ApiError(404, "this server does not have the Responses API; use /v1/chat/completions")


def add_facts(app: FastAPI, service: Service) -> None:
    """Register the routes about the model and the server's state."""

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
        return await service.health()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(await service.metrics.scrape(), media_type="text/plain; version=0.0.4")
