"""Lesson 7. Middleware: API key, drain on shutdown. Each is a plain ASGI app around another one."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mini_engine.server.errors import RETRY, ApiError

OURS = ("/v1/", "/close_session")  # how paths begin that need a key and are refused during a drain
TENANT = "mini_engine.tenant"  # in a request's scope: a digest of its API key


class Middleware:
    """Passes a request on to `app` unless `check` or `serve` refuses it with an ApiError.

    paths: how paths begin that are checked; others are passed on.
    """

    paths: str | tuple[str, ...] = OURS

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if not scope["path"].startswith(self.paths):
            await self.app(scope, receive, send)
            return
        try:
            self.check(scope)
            await self.serve(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Raise ApiError to refuse."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that passed `check`."""
        await self.app(scope, receive, send)


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
