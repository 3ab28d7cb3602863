"""Lesson 7. /openapi.json: the routes' requests and responses. They read and write by hand, so FastAPI cannot know."""

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mini_engine.server.answer_models import Error
from mini_engine.server.json_text import JsonObject
from mini_engine.server.middleware import OURS

REFUSALS = {
    400: "The request is invalid; the message says why, `param` says where.",
    401: "The API key is missing or wrong.",
    403: "The `Host` header names another host.",
    404: "There is no such model.",
    405: "The path does not support this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests are waiting; try again after `Retry-After` seconds.",
    500: "The engine failed.",
    503: "The server is shutting down, or too many connections are open; try again after `Retry-After` seconds.",
}
WITH_RETRY = (429, 503)
SECONDS = {"description": "Seconds after which to try again.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
REQUEST_ID = {"description": "The request's id: the client's, or a new one.", "schema": {"type": "string"}}
KEY = {"ApiKey": {"type": "http", "scheme": "bearer", "description": "The key that `--api-key` names."}}


def refusals() -> dict[int | str, JsonObject]:
    """Return the refusals of routes below /v1/, as FastAPI's `responses`."""
    retry = {"headers": {"Retry-After": SECONDS}}
    return {
        status: {"model": Error, "description": text} | (retry if status in WITH_RETRY else {})
        for status, text in REFUSALS.items()
    }


def gives(model: type[BaseModel], events: str) -> dict[int | str, JsonObject]:
    """Return the responses of a route that runs the model: a whole answer, a stream of events, or a refusal."""
    event = {
        "type": "object",
        "description": events,
        "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
        "required": ["data"],
    }
    answer = {"model": model, "description": "The answer: whole, or with `stream` as events."}
    return {200: answer | {"content": {"text/event-stream": {"schema": event}}}} | refusals()


def takes(model: type[BaseModel]) -> JsonObject:
    """Return the description of a route's body, for FastAPI's `openapi_extra`."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, bodies: tuple[type[BaseModel], ...], keyed: bool) -> None:
    """Complete /openapi.json with everything that FastAPI cannot know.

    Args:
        bodies: the models that routes read by hand.
        keyed: an API key is required.
    """
    _, found = models_json_schema(
        [(model, "validation") for model in bodies], ref_template="#/components/schemas/{model}"
    )
    made = app.openapi

    def openapi() -> JsonObject:
        description = made()
        components = description.setdefault("components", {})
        components.setdefault("schemas", {}).update(found["$defs"])
        components["securitySchemes"] = KEY
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own errors, which this server does not send
            components["schemas"].pop(name, None)
        for path, routes in description["paths"].items():
            for route in routes.values():
                route["security"] = [{"ApiKey": []}] if keyed and path.startswith(OURS) else []
                route["responses"].pop("422", None)
                for response in route["responses"].values():
                    response.setdefault("headers", {})["x-request-id"] = REQUEST_ID
        return description

    app.openapi = openapi
