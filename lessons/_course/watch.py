"""Course machinery. Sees when the student saves."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

LOOK_SECONDS = 0.3


def state(paths: Sequence[Path]) -> tuple:
    """Something that differs after each save. A file that an editor is just replacing counts as unchanged later."""
    return tuple(map(stamp, paths))


def stamp(path: Path) -> tuple[int, int] | None:
    """When it was written and how long it is; None where it is away, or locked, for a moment."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class Saves:
    """Remembers what was seen last; `changed` is true once the files differ from it and are all there."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.seen = state(paths)

    def changed(self) -> bool:
        now = state(self.paths)
        return None not in now and now != self.seen

    def take(self) -> None:
        """What is there now has been seen."""
        self.seen = state(self.paths)

    def wait(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Return after the next save."""
        while not self.changed():
            sleep(LOOK_SECONDS)
