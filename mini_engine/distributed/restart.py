"""Lesson 13. SIGHUP replaces the processes that answer, one after another, while requests go on.

They are replicas, or lesson 19's prefill workers.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mini_engine.base.errors import UserError
from mini_engine.base.signals import handling

log = logging.getLogger(__name__)


class Restart:
    """Replaces processes in a separate thread. Further calls while it runs are ignored.

    Args:
        replace: replaces all of them. what: the processes, for the output.
    """

    def __init__(self, replace: Callable[[], object], what: str) -> None:
        self.replace, self.what = replace, what
        self.running = threading.Lock()

    def begin(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Start replacing, unless that is under way. A signal handler."""
        if self.running.acquire(blocking=False):
            threading.Thread(target=self._run, name="restart", daemon=True).start()

    def _run(self) -> None:
        try:
            self.replace()
        except Exception as error:
            is_known = isinstance(error, UserError | OSError)
            log.error("%s were not replaced; running ones continue: %s", self.what, error, exc_info=not is_known)
        else:
            with suppress(OSError):  # the output's disk may be full
                print(f"replaced {self.what}", flush=True)
        finally:
            self.running.release()


@contextmanager
def replacing_on_hangup(replace: Callable[[], object], what: str) -> Iterator[Restart]:
    """Replace processes whenever SIGHUP arrives; see `Restart`. Windows has no such signal."""
    restart = Restart(replace, what)
    if not hasattr(signal, "SIGHUP"):
        yield restart
        return
    with handling(signal.SIGHUP, restart.begin):
        yield restart
