"""Lesson 7. Bodies arrive in full, within a size and a time, before the app runs. uvicorn and h11 bound neither."""

import asyncio

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.server.errors import ApiError
from mini_engine.server.middleware import Middleware

TURNS = 3  # of the event loop


class BodyLimit(Middleware):
    """Reads the whole body before the app runs, and refuses one that is too large or too slow.

    Args:
        max_bytes: of one body. A larger one is refused at once if its header says so, otherwise once it exceeds this.
        max_seconds: for the whole body, so that a trickle of bytes cannot keep a connection open.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float = 60.0) -> None:
        super().__init__(app)
        self.max_bytes, self.max_seconds = max_bytes, max_seconds

    def check(self, scope: Scope) -> None:
        """Refuse a request whose headers are wrong already."""
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > self.max_bytes:
            raise self.too_large()
        if "transfer-encoding" in headers and "content-length" in headers:  # two lengths: request smuggling
            raise ApiError(400, "both Transfer-Encoding and Content-Length are given; send one of them")

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then serve, unless the client has hung up by then."""
        body = bytearray()
        try:
            async with asyncio.timeout(self.max_seconds):
                async for piece in Request(scope, receive).stream():
                    body += piece
                    if len(body) > self.max_bytes:
                        raise self.too_large()
        except TimeoutError:
            late = ApiError(408, f"the body did not arrive within {self.max_seconds:g} seconds")
            await late.response()(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except ClientDisconnect:
            return
        else:
            if not await has_gone(scope, receive):
                await self.app(scope, replay(bytes(body), receive), send)

    def too_large(self) -> ApiError:
        """Return the refusal of a body of more than `max_bytes`."""
        message = f"the body is larger than {self.max_bytes} bytes, the most that this server accepts"
        return ApiError(413, message, code="body_too_large")


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields this body first, and then the following messages."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return left.pop() if left else await receive()

    return replayed


async def has_gone(scope: Scope, receive: Receive) -> bool:
    """Return True if the client, whose request has just arrived in full, has already hung up.

    A burst of clients that send a request and hang up should not cost any tokenizing. The event loop notices an end
    that arrived with the request in its next turn, and tells the app in the one after that.
    """
    request = Request(scope, receive)
    for _ in range(TURNS):
        if await request.is_disconnected():
            return True
        await asyncio.sleep(0)
    return await request.is_disconnected()
