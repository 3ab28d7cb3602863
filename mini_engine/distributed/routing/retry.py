"""Lesson 13. Retries the request of a lost replica, as long as the reader has seen nothing of the answer.

Before the first item, a second attempt cannot be told from the first. After it, it can: sampled without a seed, the
second answer is a different one, and even an equal one would start over.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


class ReplicaLost(RuntimeError):
    """The replica that was answering has ended."""


async def with_retries(attempt: Callable[[], AsyncGenerator[Item, None]], most: int = 3) -> AsyncGenerator[Item, None]:
    """Yield an answer's items as they come; if its replica is lost before the first of them, attempt it again.

    An attempt is closed before the next one begins, and when the reader leaves. Errors other than ReplicaLost are
    passed on at once: another replica would fail in the same way.

    Args:
        attempt: starts the answer at a replica of the router's choice, and raises ReplicaLost if that replica ends.
        most: the most attempts.

    Raises:
        ReplicaLost: an item had been yielded, or this was the last attempt.
        ValueError: `most` is below 1.
    """
    if most < 1:
        raise ValueError(f"most is {most}; allow at least 1 attempt")
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
