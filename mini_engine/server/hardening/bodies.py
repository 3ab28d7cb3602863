"""Lesson 7. Bodies: they arrive in full, within a size and a time, and none of them holds up other clients.

uvicorn and h11 bound neither size nor time, and pydantic does not release Python's lock before it is done. So
a body of more than MAX_VALUES values is refused unparsed, and large ones are parsed in a thread; for small ones, the
thread switch would cost more than it saves.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.server.errors import ApiError
from mini_engine.server.fields import Body
from mini_engine.server.json_text import MAX_VALUES, num_values
from mini_engine.server.middleware import Middleware

TURNS = 3  # of the event loop
SMALL = 2**14  # bytes
THREAD = ThreadPoolExecutor(1, "bodies")  # large bodies take turns

Wanted = TypeVar("Wanted", bound=Body)


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
            raise ApiError(408, f"the body did not arrive within {self.max_seconds:g} seconds") from None
        except ClientDisconnect:
            return
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
    for _ in range(TURNS):
        await asyncio.sleep(0)
    return await Request(scope, receive).is_disconnected()


async def read_body(request: Request, model: type[Wanted]) -> Wanted:
    """Read the request's body as a `model`.

    Raises:
        RequestValidationError: the body is not JSON, or does not match `model`.
        ApiError: it has too many values, or a Content-Encoding.
    """
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise ApiError(400, f"the body has the Content-Encoding {coding!r}; send it as it is, without that header")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestValidationError([{"type": "model_type", "loc": ("body",)}])
    data = await request.body()
    if len(data) <= SMALL:
        return parsed(data, model)
    return await asyncio.get_running_loop().run_in_executor(THREAD, parsed, data, model)


def parsed(data: bytes, model: type[Wanted]) -> Wanted:
    """Parse and validate a body."""
    if num_values(data) > MAX_VALUES:
        raise ApiError(400, f"the body has more than {MAX_VALUES} values; send several requests")
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        wrongs = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in wrongs]) from None
