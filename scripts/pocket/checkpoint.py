"""Course machinery. Writes a checkpoint's directory: all files or none."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def all_or_nothing(out: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `out`. If the block succeeds, its files move into `out`; otherwise none."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        yield Path(scratch)
        with _deaf_to_ctrl_c():
            out.mkdir(exist_ok=True)
            for file in sorted(Path(scratch).iterdir()):
                file.replace(out / file.name)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Defer Ctrl-C until a few renames are done."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
