"""Lesson 7. What a client is told when it cannot be served: OpenAI's shape, one clear sentence, the right status.

{"error": {"message": "…", "type": "invalid_request_error", "param": "temperature", "code": null}}
"""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mini_engine.engine.worker import EngineStopped, QueueFull
from mini_engine.errors import UserError

RETRY_SECONDS = 1
RETRY = {"Retry-After": str(RETRY_SECONDS)}
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

log = logging.getLogger(__name__)


class ApiError(HTTPException):
    """A request that is refused.

    Args:
        status: 4xx for what the client can mend, 5xx for what it cannot.
        param: the parameter that is at fault.
        code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI words it."""
        kind = TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body, self.status_code, self.headers)


def refusal(error: RequestValidationError) -> ApiError:
    """What is wrong with a request's body, the first thing of it, naming the parameter.

    A parameter that this server does not have is refused: a client that asks for something and silently gets something
    else would never know.
    """
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if not path:
        return ApiError(400, "the body must be a JSON object, with Content-Type: application/json")
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"this server does not support the parameter {name!r}; leave it out", param=path[0])
    return ApiError(400, f"{name}: {first['msg']}", param=path[0])


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of `error`, whatever it is."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return refusal(error)
        case UserError():
            return ApiError(400, str(error), param=error.param)
        case QueueFull():
            return ApiError(429, str(error), code="rate_limit_exceeded", headers=RETRY)
        case EngineStopped():
            return ApiError(503, str(error), code="shutting_down", headers=RETRY)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return ApiError(500, f"{type(error).__name__}: {error}")


def install_handlers(app: FastAPI) -> None:
    """Let every error of the app's routes take OpenAI's shape."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    for kind in (HTTPException, RequestValidationError, UserError, QueueFull, EngineStopped, Exception):
        app.add_exception_handler(kind, handle)
