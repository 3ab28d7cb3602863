"""Lesson 7. The routes about the model and the server's state. Only the model's require a key."""

from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from mini_engine.server.answer_models import Health, ModelCard, ModelList
from mini_engine.server.description import refusals
from mini_engine.server.server_config import ServerConfig

FACTS = (400, 401, 403, 405, 408, 413, 503)
DEAD = {"model": Health, "description": "The engine has stopped or is stuck."}
NOT_READY = {"model": Health, "description": "The server is draining, or the engine cannot answer."}


class Described(Protocol):
    """A service as these routes see it: lesson 7's Service. metrics: has `scrape`."""

    config: ServerConfig
    metrics: Any

    def model_card(self, name: str) -> dict[str, Any]: ...

    def check_model(self, name: str) -> None: ...

    async def health(self) -> JSONResponse: ...


def add_facts(app: FastAPI, service: Described) -> None:
    """Register the routes about the model and the server's state."""

    @app.get("/v1/models", response_model=ModelList, responses=refusals(*FACTS))
    async def models() -> dict[str, Any]:
        """List the one model served here, once under each of its names."""
        names = (service.config.model_name, *service.config.aliases)
        return {"object": "list", "data": [service.model_card(name) for name in names]}

    @app.get("/v1/models/{name:path}", response_model=ModelCard, responses=refusals(404, *FACTS))
    async def model(name: str) -> dict[str, Any]:
        """Describe a model by its name."""
        service.check_model(name)
        return service.model_card(name)

    @app.get("/health", response_model=Health, responses={503: DEAD})
    async def health() -> JSONResponse:
        """Report whether the engine thread is alive and its steps return."""
        return await service.health()

    @app.head("/health", include_in_schema=False)
    async def health_head() -> Response:
        """Report the same by the status alone."""
        return await service.health()

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", response_model=Health, responses={503: NOT_READY})
    async def ready(request: Request) -> JSONResponse:
        """Report whether new requests are taken: like /health, but 503 while the server drains."""
        if request.app.state.drain.draining:
            return JSONResponse({"status": "the server is shutting down"}, 503)
        return await service.health()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return metrics in Prometheus' text format."""
        text = await service.metrics.scrape() + request.app.state.traffic.text()
        return Response(text, media_type="text/plain; version=0.0.4")
