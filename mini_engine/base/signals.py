"""Course machinery. Handlers of signals for as long as a block runs."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handling(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal with `handler` within the block, and as before it afterwards. Only in the main thread."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def noting(number: int, twice: type[BaseException] | None = None) -> Iterator[Callable[[], bool]]:
    """Let a signal set a flag that the yielded function reads. twice: raised when it comes again."""
    noted = []

    def note(number: int, frame: object) -> None:
        if noted and twice is not None:
            raise twice
        noted.append(number)

    with handling(number, note):
        yield lambda: bool(noted)
