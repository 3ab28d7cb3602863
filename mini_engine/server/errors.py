"""Lesson 7. Errors in the form that clients get: OpenAI's shape, one clear sentence, the right status.

{"error": {"message": "…", "type": "invalid_request_error", "param": "temperature", "code": null}}
"""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mini_engine.base.errors import UserError
from mini_engine.engine.worker import EngineStopped, QueueFull

RETRY = {"Retry-After": "1"}  # seconds
SHOWN = 1000  # characters of a message; a client's own text may be part of it
TYPES = {429: "rate_limit_error"}

log = logging.getLogger(__name__)


class ApiError(HTTPException):
    """A refused request.

    Args:
        status: 4xx if the client can fix the error, otherwise 5xx.
        param: the parameter at fault.
        code: a word that programs can check, such as "model_not_found".
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, shortened(message, SHOWN), headers)
        self.param, self.code = param and shortened(param, SHOWN // 10), code

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        kind = TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body, self.status_code, self.headers)


def shortened(text: str, most: int) -> str:
    """Return the first `most` characters of a text, with an ellipsis if it is longer."""
    return text if len(text) <= most else text[: most - 1] + "…"


def refusal(error: RequestValidationError) -> ApiError:
    """Return the first problem of a request's body as a 400 that names the parameter.

    Unknown parameters are refused too: a client that asks for one thing and silently gets another never finds out.

    Args:
        error: `error.errors()` lists the problems, as dicts. `type`: "json_invalid", "extra_forbidden" for an unknown
            parameter, or any other. `loc`: "body" and the path to the value, as in ("body", "messages", 0, "role"), or
            ("body",) alone if the body is not an object. `msg`: a sentence. For "json_invalid", `loc` ends with a
            position in the text instead of a path, and `ctx["error"]` describes the problem.

    Returns:
        an ApiError whose message has the whole path, such as `messages.0.role`, and the problem, `msg` (an unknown
        parameter needs only its name), and whose `param` is the first part of the path. Without a path, `param` is
        None. If the body is not JSON, the message has `ctx["error"]`.
    """
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if not path:
        return ApiError(400, "the body must be a JSON object, with Content-Type: application/json")
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"this server does not support the parameter {name!r}; leave it out", param=path[0])
    return ApiError(400, f"{name}: {first['msg']}", param=path[0])


def as_api_error(error: Exception) -> ApiError:
    """Return the ApiError that a client gets for `error`, whatever its type.

    An ApiError is returned unchanged. Any other HTTPException keeps its status, message (`detail`) and headers. A
    UserError is 400 with its message and `param`, a RequestValidationError is handled by `refusal`. QueueFull is 429
    with the code "rate_limit_exceeded", EngineStopped 503 with "shutting_down", both with their message and the headers
    `RETRY`. Everything else is 500, with the exception's type and text as the message.
    """
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
    """Give every error of the app's routes OpenAI's shape."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    for kind in (HTTPException, RequestValidationError, UserError, QueueFull, EngineStopped, Exception):
        app.add_exception_handler(kind, handle)
