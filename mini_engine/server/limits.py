"""Lesson 7. Three doors before the app: who may come in, how large a body may be, and whether the house is closing.

Each is a plain ASGI app around another one, so that it also sees what comes in pieces, and leaves the rest alone.
"""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.server.errors import RETRY, ApiError

OURS = "/v1/"


class Door:
    """Lets every request through to `app` that `check` does not refuse with an ApiError. Only /v1/ has doors."""

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
        await self.enter(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Raise ApiError to refuse."""

    async def enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve what was let through."""
        await self.app(scope, receive, send)


class ApiKey(Door):
    """Asks for `Authorization: Bearer KEY`; without a key set, for nothing."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        super().__init__(app)
        self.expected = None if key is None else f"Bearer {key}".encode()

    def check(self, scope: Scope) -> None:
        """Compare in a time that tells nothing about the key."""
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        if self.expected is not None and not hmac.compare_digest(given, self.expected):
            raise ApiError(401, "a wrong API key, or none; send Authorization: Bearer KEY", code="invalid_api_key")


class BodyLimit(Door):
    """Refuses a body of more than `max_bytes`: at once if its header says so, else as soon as too many have come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        super().__init__(app)
        self.max_bytes = max_bytes
        self.too_large = f"the body is larger than {max_bytes} bytes, the most that this server takes"

    def check(self, scope: Scope) -> None:
        """Believe a Content-Length that is too large."""
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length[:20]) > self.max_bytes:
            raise ApiError(413, self.too_large, code="body_too_large")

    async def enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what comes in."""
        left = self.max_bytes

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise ApiError(413, self.too_large, code="body_too_large")
            return message

        await self.app(scope, counted, send)


class Gate(Door):
    """Counts who is inside, and lets nobody in once it is closed: those inside are served, the house empties."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self.num_inside = 0
        self.closed = False

    def close(self) -> None:
        """From now on every new request is refused with 503."""
        self.closed = True

    def check(self, scope: Scope) -> None:
        """Refuse when closed, and ask the client to come back on another connection."""
        if self.closed:
            message = "the server is shutting down and takes no more requests"
            raise ApiError(503, message, code="shutting_down", headers=RETRY | {"Connection": "close"})

    async def enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count it while it is served."""
        self.num_inside += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.num_inside -= 1
