"""Lesson 7. Middleware: request id, API key, body limit, drain on shutdown.

Each is a plain ASGI app around another one, so it also sees bodies that arrive in pieces.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.server.disconnect import has_gone
from mini_engine.server.errors import RETRY, ApiError

OURS = "/v1/"
TENANT = "mini_engine.tenant"  # in a request's scope: a digest of its API key
CLOSED = (b"connection", b"close")
PORT = re.compile(r":[0-9]*$")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Middleware:
    """Passes a request on to `app` unless `check` refuses it with an ApiError. Paths outside /v1/ are never checked."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
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
    """Puts a request's id on its response: the client's `x-request-id`, or a new one. For every path."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
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


class HostCheck:
    """Refuses requests whose `Host` header names none of `hosts`. For every path.

    Web pages can reach a server that listens only on this machine: if a page's own name suddenly resolves to 127.0.0.1,
    the browser lets it read the responses (DNS rebinding). The header still has the page's name.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self.app = app
        self.hosts = {f"[{host}]" if ":" in host else host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        given = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if given is None or PORT.sub("", given.strip().lower()) in self.hosts:  # only HTTP/1.0 may omit it
            await self.app(scope, receive, send)
            return
        message = f"the Host {given[:100]!r} is not allowed; use the server's address, or start it with --allow-host"
        await ApiError(403, message, code="host_not_allowed").response()(scope, receive, send)


class CloseUnread:
    """Adds `Connection: close` to a response if the app has not read the request's body. For every path.

    Otherwise HTTP obliges the server to read up to the next request, for as long as the client keeps sending.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        unread = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"

        async def noted() -> Message:
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and unread and CLOSED not in message.get("headers", ()):
                message["headers"] = [*message.get("headers", ()), CLOSED]
            await send(message)

        await self.app(scope, noted, closing)


class ApiKey(Middleware):
    """Requires `Authorization: Bearer KEY` with one of the keys. `/health`, `/metrics` and `/docs` stay open.

    Puts a digest of the key in the request's scope, as TENANT. If there are no keys, none is required.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        super().__init__(app)
        self.digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]

    def check(self, scope: Scope) -> None:
        """Compare with every key in constant time. The scheme's name is case-insensitive (RFC 9110, 11.1)."""
        if not self.digests:
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        found = hashlib.sha256(given.lstrip(" ").encode("latin-1")).hexdigest()
        fits = [hmac.compare_digest(found, digest) for digest in self.digests]  # always all of them
        if scheme.lower() != "bearer" or not any(fits):
            raise ApiError(401, "the key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key")
        scope[TENANT] = found


class BodyLimit(Middleware):
    """Reads the whole body before the app runs, and refuses one that is too large or too slow.

    Args:
        max_bytes: of one body. A larger one is refused at once if its header says so, otherwise once it exceeds this.
        max_seconds: for the whole body, so that a trickle of bytes cannot keep a connection open.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float = 60.0) -> None:
        super().__init__(app)
        self.max_bytes, self.max_seconds = max_bytes, max_seconds
        self.too_large = f"the body is larger than {max_bytes} bytes, the most that this server accepts"

    def check(self, scope: Scope) -> None:
        """Refuse a request whose headers are wrong already."""
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > self.max_bytes:
            raise ApiError(413, self.too_large, code="body_too_large")
        if "transfer-encoding" in headers and "content-length" in headers:  # two lengths: request smuggling
            raise ApiError(400, "both Transfer-Encoding and Content-Length are given; send one of them")

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then serve."""
        try:
            async with asyncio.timeout(self.max_seconds):
                body = await self.read(receive)
        except TimeoutError:
            late = ApiError(408, f"the body did not arrive within {self.max_seconds:g} seconds")
            await late.response()(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except ConnectionResetError:
            return
        else:
            if not await has_gone(receive):
                await self.app(scope, replay(body, receive), send)

    async def read(self, receive: Receive) -> bytes:
        """Return the body. ApiError if it is too large, ConnectionResetError if the client disconnects."""
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
    """Return a `receive` that yields this body first, and then the following messages."""
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

        The latter makes the client open a new connection, to a server that is not shutting down.
        """
        if self.draining:
            message = "the server is shutting down and accepts no new requests"
            raise ApiError(503, message, code="shutting_down", headers=RETRY | {"Connection": "close"})

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the request in `num_in_flight` while `app` serves it, even if that ends in an error or cancellation."""
        self.num_in_flight += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.num_in_flight -= 1
