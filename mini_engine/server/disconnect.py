"""Lesson 7. A client that goes away takes its work with it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client has closed its connection; there is nobody to answer."""


async def gone(receive: Receive) -> None:
    """Wait until the client has gone away. Call it when the request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work`; if the client goes away before it is done, cancel it.

    Args:
        receive: ASGI's, by which the server says what the client does.

    Raises:
        ClientGone: it went away. By then the work has ended, and its `finally` blocks have run.
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
