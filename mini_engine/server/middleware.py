"""Lesson 7. Middleware: request id, API key, body limit, drain on shutdown.

Each is a plain ASGI app wrapped around another one, so it also sees bodies that arrive in pieces.
"""

import asyncio
import hmac
import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.server.errors import RETRY, ApiError

OURS = "/v1/"
CLOSE = {"Connection": "close"}
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


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


class RequestId:
    """Put a request's id on its response: the client's `x-request-id`, or a new one. For every path."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What ASGI calls."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        await self.app(scope, receive, named)


class ApiKey(Middleware):
    """Require `Authorization: Bearer KEY`, or nothing if no key is set. `/health`, `/metrics` and `/docs` stay open."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        super().__init__(app)
        self.expected = None if key is None else key.encode()

    def check(self, scope: Scope) -> None:
        """Compare in constant time. The scheme's name may be written in any case (RFC 9110, 11.1)."""
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if self.expected is None:
            return
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.lstrip(" ").encode("latin-1"), self.expected):
            raise ApiError(401, "a wrong API key, or none; send Authorization: Bearer KEY", code="invalid_api_key")


class BodyLimit(Middleware):
    """Read the whole body before the app runs, and refuse one that is too large or too slow.

    Args:
        max_bytes: of one body. A larger one is refused at once if its header says so, otherwise once too much came.
        max_seconds: for the whole body, so that a byte now and then keeps nothing open.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float = 60.0) -> None:
        super().__init__(app)
        self.max_bytes, self.max_seconds = max_bytes, max_seconds
        self.too_large = f"the body is larger than {max_bytes} bytes, the most that this server takes"

    def check(self, scope: Scope) -> None:
        """Refuse what its headers already say is wrong."""
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > self.max_bytes:
            raise ApiError(413, self.too_large, code="body_too_large")
        if "transfer-encoding" in headers and "content-length" in headers:  # two lengths: request smuggling
            raise ApiError(400, "both Transfer-Encoding and Content-Length are given; send one of them", headers=CLOSE)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then serve."""
        try:
            async with asyncio.timeout(self.max_seconds):
                body = await self.read(receive)
        except TimeoutError:
            late = ApiError(408, f"the body did not arrive within {self.max_seconds:g} seconds", headers=CLOSE)
            await late.response()(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except ConnectionResetError:
            return
        else:
            await self.app(scope, replay(body, receive), send)

    async def read(self, receive: Receive) -> bytes:
        """The body. ApiError if it is too large, ConnectionResetError if the client goes."""
        pieces, left, more = [], self.max_bytes, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            pieces.append(message.get("body", b""))
            left -= len(pieces[-1])
            if left < 0:
                raise ApiError(413, self.too_large, code="body_too_large")
            more = message.get("more_body", False)
        return b"".join(pieces)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives this body, then what comes after it."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return left.pop() if left else await receive()

    return replayed


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
        """While draining, raise ApiError: 503, code "shutting_down", headers `RETRY` and `Connection: close`.

        The latter makes the client open another connection, to a server that is not about to end.
        """
        if self.draining:
            message = "the server is shutting down and accepts no new requests"
            raise ApiError(503, message, code="shutting_down", headers=RETRY | {"Connection": "close"})

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the request in `num_in_flight` while `app` serves it, however that ends: an error, a cancellation."""
        self.num_in_flight += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.num_in_flight -= 1
