"""Course machinery. The few classes of FastAPI and Starlette that lesson 7's functions make and read, for a page.

A page has no server: what needs one, or pydantic's validation, is left out there. An error, a validation error and a
response only carry values; these carry the same (tests/course/test_small_web.py).
"""

import http
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class HTTPException(Exception):
    def __init__(self, status_code: int, detail: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.status_code, self.headers = status_code, headers
        self.detail = http.HTTPStatus(status_code).phrase if detail is None else detail

    def __str__(self) -> str:
        return f"{self.status_code}: {self.detail}"


class RequestValidationError(Exception):
    def __init__(self, errors: Sequence[Any]) -> None:
        self._errors = errors

    def errors(self) -> Sequence[Any]:
        return self._errors


class Headers(dict[str, str]):
    """Headers by name, in whatever case. scope: an ASGI scope to take them from."""

    def __init__(self, headers: Mapping[str, str] | None = None, scope: Mapping[str, Any] | None = None) -> None:
        given = headers.items() if headers else ((k.decode(), v.decode()) for k, v in (scope or {}).get("headers", ()))
        super().__init__((name.lower(), value) for name, value in given)

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key.lower(), default)


class JSONResponse:
    """A response whose body is JSON; called by ASGI."""

    def __init__(self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        self.status_code = status_code
        own = {"content-length": str(len(self.body)), "content-type": "application/json"}
        self.headers = Headers({**(headers or {}), **own})

    async def __call__(self, scope: Any, receive: Callable, send: Callable) -> None:
        raw = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status_code, "headers": raw})
        await send({"type": "http.response.body", "body": self.body})


WEB: dict[str, Any] = {each.__name__: each for each in (HTTPException, RequestValidationError, Headers, JSONResponse)}
