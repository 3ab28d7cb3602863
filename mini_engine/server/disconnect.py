"""Lesson 7. A client that disconnects takes its work with it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

CLIENT_CLOSED = 499  # nginx's status for a client that has gone

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client has closed its connection."""


async def gone(receive: Receive) -> None:
    """Wait until the client disconnects. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`, and cancel it if the client disconnects first.

    Args:
        receive: ASGI's `receive`, through which the server reports a disconnect.

    Returns:
        the result of `work`, even if the client leaves just after it is done. Exceptions in `work` propagate.

    Raises:
        ClientGone: the client disconnected first. By then `work` has ended and its `finally` blocks have run.
        CancelledError: the caller was cancelled; `work` has been cancelled too, and has ended.

    However it ends, no task is left running.
    """
    working, leaving = tasks = asyncio.create_task(work), asyncio.create_task(gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done() and not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
