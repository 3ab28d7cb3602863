"""Lesson 7. The app: its routes, the drain, and the defence around them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send

from mini_engine.engine.worker import EngineWorker
from mini_engine.server.answer_models import Chat, Closed, Completion, Health, ModelCard, ModelList, ResponseAnswer
from mini_engine.server.chat_protocol import ChatRequest
from mini_engine.server.description import describe, gives, refusals, takes
from mini_engine.server.errors import install_handlers
from mini_engine.server.hardening.bodies import read_body
from mini_engine.server.hardening.wrapping import harden
from mini_engine.server.metrics import Metrics
from mini_engine.server.middleware import Drain
from mini_engine.server.protocol import CloseSession, CompletionRequest
from mini_engine.server.reply import Reply
from mini_engine.server.reply_formats import ChatFormat, CompletionFormat
from mini_engine.server.responses import ResponsesReply
from mini_engine.server.responses_protocol import ResponsesRequest
from mini_engine.server.server_config import ServerConfig
from mini_engine.server.service import Service
from mini_engine.server.tool_calls import CallReader

CHUNKS = "Each event's `data` is a JSON chunk; the last one is `[DONE]`, or an error."
TYPED = "Each event's `data` is a JSON object, whose `type` is the event's name."
DEAD = {"model": Health, "description": "The engine has stopped or is stuck."}
NOT_READY = {"model": Health, "description": "The server is draining, or the engine cannot answer."}


class ServerApp:
    """The routes behind their middleware, as uvicorn runs them.

    Attributes:
        drain: counts the requests in flight and refuses new ones at the end.
        traffic: counts responses, and logs refusals.
    """

    def __init__(self, service: Service) -> None:
        self.config, self.worker = service.config, service.worker
        self.routes = FastAPI(
            title="mini_engine",
            summary="A course's LLM server, with OpenAI's routes.",
            redoc_url=None,
            redirect_slashes=False,  # a redirect would name the host that the client's Host header names
        )
        self.drain = Drain(self.routes)
        self.hardened = harden(self.drain, service.config)
        self.traffic = self.hardened.traffic
        install_handlers(self.routes)
        add_answers(self.routes, service)
        add_sessions(self.routes, service)
        add_models(self.routes, service)
        add_health(self.routes, service, self.drain, self.traffic.text)
        bodies = (CompletionRequest, ChatRequest, ResponsesRequest, CloseSession)
        describe(self.routes, bodies, bool(service.config.api_keys))

    def prepare(self) -> None:
        """Build /openapi.json, which takes a third of a second: the first request for it would stall all others."""
        self.routes.openapi()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        try:
            await self.hardened(scope, receive, send)
        except asyncio.CancelledError:
            if not self.drain.draining:
                raise  # otherwise uvicorn has cut off the remaining requests, and there is no response to send


def create_app(worker: EngineWorker, config: ServerConfig, metrics: Metrics) -> ServerApp:
    """Return the app behind its middleware."""
    return ServerApp(Service(worker, config, metrics.scrape))


def add_answers(app: FastAPI, service: Service) -> None:
    """Register the routes that run the model."""

    @app.post("/v1/completions", responses=gives(Completion, CHUNKS), openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        wanted = await read_body(request, CompletionRequest)
        return await service.answer(partial(Reply, CompletionFormat), wanted, request)

    @app.post("/v1/chat/completions", responses=gives(Chat, CHUNKS), openapi_extra=takes(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        wanted = await read_body(request, ChatRequest)
        form = wanted.form
        shape = partial(CallReader, form.may_say) if form is not None and form.functions else ChatFormat
        return await service.answer(partial(Reply, shape), wanted, request)

    @app.post("/v1/responses", responses=gives(ResponseAnswer, TYPED), openapi_extra=takes(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation in the form of OpenAI's Responses API."""
        asked = await read_body(request, ResponsesRequest)
        return await service.answer(partial(ResponsesReply, asked), asked.as_chat, request)


def add_sessions(app: FastAPI, service: Service) -> None:
    """Register the route that ends a session (lesson 20)."""

    @app.post("/close_session", response_model=Closed, responses=refusals(), openapi_extra=takes(CloseSession))
    async def close_session(request: Request) -> dict[str, bool]:
        """Say that a conversation has no next turn: its KV stays cached, and returns to the usual order of eviction."""
        return await service.close_session(await read_body(request, CloseSession), request)


def add_models(app: FastAPI, service: Service) -> None:
    """Register the routes about the model."""

    @app.get("/v1/models", response_model=ModelList, responses=refusals())
    async def models() -> dict[str, Any]:
        """List the one model served here, once under each of its names."""
        names = (service.config.model_name, *service.config.aliases)
        return {"object": "list", "data": [service.model_card(name) for name in names]}

    @app.get("/v1/models/{name:path}", response_model=ModelCard, responses=refusals())
    async def model(name: str) -> dict[str, Any]:
        """Describe a model by its name."""
        service.check_model(name)
        return service.model_card(name)


def add_health(app: FastAPI, service: Service, drain: Drain, traffic: Callable[[], bytes]) -> None:
    """Register the routes about the server's state. None requires a key. traffic: returns more metrics."""

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=Health, responses={503: DEAD})
    async def health() -> JSONResponse:
        """Report whether the engine thread is alive and its steps return."""
        return await service.health()

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", response_model=Health, responses={503: NOT_READY})
    async def ready() -> JSONResponse:
        """Report whether new requests are taken: like /health, but 503 while the server drains."""
        if drain.draining:
            return JSONResponse({"status": "the server is shutting down"}, 503)
        return await service.health()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        text = await service.scrape() + traffic()
        return Response(text, media_type="text/plain; version=0.0.4")
