"""Lesson 7. Server-sent events: a response in pieces, each sent as soon as it exists.

The format is section 9.2 of the HTML standard: lines of `field: value`, and an empty line ends an event. OpenAI's
streams carry JSON in `data` and end with `data: [DONE]`, or with an error.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mini_engine.server.disconnect import ClientGone, unless_gone
from mini_engine.server.errors import ApiError
from mini_engine.server.json_text import to_json

DONE = "[DONE]"
COMMENT = b": still here\n\n"  # clients ignore lines that begin with a colon


def event(data: str) -> bytes:
    """Return one event as UTF-8: `data: ` before each line of `data`, a line feed after it, and a final empty line.

    A line break inside `data` would end the event, so every line gets its own `data: `; the client joins the lines with
    line feeds. CR LF, LF and CR are line breaks. An empty string is one empty line.
    """
    lines = data.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return ("".join(f"data: {line}\n" for line in lines) + "\n").encode("utf-8")


class EventStream(Response):
    """Sends each text of `chunks` as an event, then `[DONE]`. If the client disconnects, `chunks` is closed at once.

    If `chunks` raises an ApiError, that is the last event, since the status has already been sent.

    Sending waits for a slow client, which delays only this response: meanwhile the engine fills this client's mailbox.

    Args:
        close: called at the end, even if `chunks` was never started and so runs no clean-up of its own.
        heartbeat: seconds of silence after which a comment is sent; None sends none.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[str, None],
        close: Callable[[], None] = lambda: None,
        heartbeat: float | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.chunks, self.close, self.heartbeat = chunks, close, heartbeat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; called by ASGI."""
        try:
            async with beating(send, self.heartbeat) as sending:
                await unless_gone(receive, self._send(sending))
        except ClientGone:
            return
        finally:
            self.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = DONE
        try:
            async with aclosing(self.chunks) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": event(chunk), "more_body": True})
        except ApiError as error:  # instead of [DONE]
            last = to_json(error.body)
        await send({"type": "http.response.body", "body": event(last)})


@asynccontextmanager
async def beating(send: Send, seconds: float | None) -> AsyncIterator[Send]:
    """Yield a `send` for a stream of events that also sends a comment after `seconds` of silence; None: never.

    Some proxies close a connection that has been silent for a minute, for example while its request is queued.
    """
    if seconds is None:
        yield send
        return
    quiet, period = asyncio.Event(), seconds

    async def sending(message: Message) -> None:
        await send(message)
        quiet.set()

    async def beat() -> None:
        await quiet.wait()  # the response has begun
        while True:
            quiet.clear()
            try:
                await asyncio.wait_for(quiet.wait(), period)
            except TimeoutError:
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    beats = asyncio.create_task(beat())
    try:
        yield sending
    finally:
        beats.cancel()
        await asyncio.gather(beats, return_exceptions=True)
