"""Course machinery. Handlers of signals for as long as a block runs."""

import signal
from collections.abc import Iterator
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
