"""Lesson 7. Middleware: API key, body size limit, drain on shutdown.

Each is a plain ASGI app wrapped around another one, so it also sees bodies that arrive in pieces.
"""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.server.errors import RETRY, ApiError

OURS = "/v1/"


class Middleware:
    """Passes a request on to `app` unless `check` refuses it with an ApiError. Paths outside /v1/ are never checked."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What ASGI calls."""
        if scope["type"] != "http" or not scope["path"].startswith(OURS):
            await self.app(scope, receive, send)
            return
        try:
            self.check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self.serve(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Raise ApiError to refuse."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that passed `check`."""
        await self.app(scope, receive, send)


class ApiKey(Middleware):
    """Require `Authorization: Bearer KEY`, or nothing if no key is set."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        super().__init__(app)
        self.expected = None if key is None else f"Bearer {key}".encode()

    def check(self, scope: Scope) -> None:
        """Compare in constant time."""
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        if self.expected is not None and not hmac.compare_digest(given, self.expected):
            raise ApiError(401, "a wrong API key, or none; send Authorization: Bearer KEY", code="invalid_api_key")


class BodyLimit(Middleware):
    """Refuse a body larger than `max_bytes`: at once if its header says so, otherwise once too many bytes came."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        super().__init__(app)
        self.max_bytes = max_bytes
        self.too_large = f"the body is larger than {max_bytes} bytes, the most that this server takes"

    def check(self, scope: Scope) -> None:
        """Refuse at once if Content-Length already says too much."""
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length[:20]) > self.max_bytes:
            raise ApiError(413, self.too_large, code="body_too_large")

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the bytes of the body as they arrive."""
        left = self.max_bytes

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise ApiError(413, self.too_large, code="body_too_large")
            return message

        await self.app(scope, counted, send)


class Drain(Middleware):
    """Counts requests in flight. Once draining has begun, they finish and new ones are refused."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self.num_in_flight = 0
        self.draining = False

    def begin(self) -> None:
        """Refuse every new request with 503 from now on."""
        self.draining = True

    def check(self, scope: Scope) -> None:
        """Refuse while draining, and ask the client to retry on another connection."""
        if self.draining:
            message = "the server is shutting down and accepts no new requests"
            raise ApiError(503, message, code="shutting_down", headers=RETRY | {"Connection": "close"})

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the request for as long as it is being served."""
        self.num_in_flight += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.num_in_flight -= 1
