"""Lesson 19. SIGHUP replaces a server's prefill workers, one after another, while requests go on."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.handover.either import EitherConnector
from mini_engine.handover.receiver import ReceivingConnector
from mini_engine.handover.workers import PrefillWorkers
from mini_engine.kv.cache_coordinator import cache_of

log = logging.getLogger(__name__)


def workers_of(engine: Engine) -> PrefillWorkers:
    """Return the prefill workers of an engine, which must have some."""
    connector = cache_of(engine.scheduler.manager).connector
    if isinstance(connector, EitherConnector):
        connector = connector.workers
    assert isinstance(connector, ReceivingConnector) and isinstance(connector.senders, PrefillWorkers)
    return connector.senders


class Restart:
    """Replaces all workers in a separate thread. Further calls while it runs are ignored."""

    def __init__(self, workers: PrefillWorkers) -> None:
        self.workers = workers
        self.running = threading.Lock()

    def begin(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Start replacing, unless that is under way. A signal handler."""
        if self.running.acquire(blocking=False):
            threading.Thread(target=self._run, name="prefill-restart", daemon=True).start()

    def _run(self) -> None:
        try:
            self.workers.replace_all()
        except (UserError, OSError) as error:
            log.error("prefill workers were not replaced; running ones continue: %s", error)
        else:
            with suppress(OSError):  # the output's disk may be full
                print("replaced all prefill workers", flush=True)
        finally:
            self.running.release()


@contextmanager
def replacing_on_hangup(engine: Engine) -> Iterator[None]:
    """Replace all prefill workers whenever SIGHUP arrives. Windows has no such signal."""
    if not hasattr(signal, "SIGHUP"):
        yield
        return
    before = signal.signal(signal.SIGHUP, Restart(workers_of(engine)).begin)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
