"""Lesson 13. A lost replica: its request is sent again, as long as the reader has seen nothing of the answer.

Before the first item nobody can tell the second attempt from the first. After it they can: sampled without a seed, the
second answer is another one, and even an equal one would begin again from the start.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


class ReplicaLost(RuntimeError):
    """The replica that was answering has ended."""


async def with_retries(attempt: Callable[[], AsyncGenerator[Item, None]], most: int = 3) -> AsyncGenerator[Item, None]:
    """Yield an answer's items; if its replica is lost before the first of them, attempt it again.

    Args:
        attempt: starts the answer at a replica of the router's choice, and raises ReplicaLost if that one ends.
        most: the most attempts.

    Raises:
        ReplicaLost: an item had been yielded, or this was the last attempt.
    """
    for left in reversed(range(most)):
        has_begun = False
        try:
            async with aclosing(attempt()) as items:
                async for item in items:
                    has_begun = True
                    yield item
            return
        except ReplicaLost:
            if has_begun or not left:
                raise
