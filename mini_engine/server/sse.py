"""Lesson 7. Server-sent events: a response in pieces, each on its way as soon as it is there.

The format is the HTML standard's, section 9.2: lines of `field: value`, and an empty line ends an event. OpenAI's
streams hold JSON in `data`, and end with `data: [DONE]`.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_engine.server.disconnect import ClientGone, unless_gone

DONE = "[DONE]"


def event(data: str) -> bytes:
    """One event. A line break would end it in the middle, so each line of `data` gets a `data:` of its own.

    The reader puts the lines together again with a line feed between; CR LF and CR arrive as that.
    """
    lines = data.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return ("".join(f"data: {line}\n" for line in lines) + "\n").encode("utf-8")


class EventStream(Response):
    """Sends each text of `chunks` as an event, then `[DONE]`. If the client goes away, `chunks` is closed at once.

    Sending waits for a slow client, and nobody else does: the engine puts what comes meanwhile into this client's own
    mailbox.

    Args:
        close: called in the end, also if `chunks` was never begun and so has nothing of its own that closes.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[str, None], close: Callable[[], None] = lambda: None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.chunks, self.close = chunks, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all; what ASGI calls."""
        try:
            await unless_gone(receive, self._send(send))
        except ClientGone:
            return
        finally:
            self.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self.chunks) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": event(chunk), "more_body": True})
        await send({"type": "http.response.body", "body": event(DONE)})
