"""Course machinery. The client of `peer_worker.py`: starts an engine's process, sends requests, ends it.

A process that dies, reports an error or takes too long becomes a PeerError of one sentence; the others continue.
"""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts import ROOT

WORKER = ("-m", "scripts.bench.peer_worker")
TAIL = 300  # characters to show of a dead process's last output
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
WAITING = "OMP_WAIT_POLICY"  # scripts.smoke sets it for busy machines; here every engine's threads wait as by default


class PeerError(RuntimeError):
    """The reason an engine cannot take part, in one sentence."""


class Peer:
    """One engine's process. A context manager: the process ends when the block does.

    Args:
        name: a key of `peer_worker.ENGINES`.
        python: the interpreter of the environment in which the engine is installed.
        environment: additional environment variables.
        worker: what the interpreter runs; tests use their own program.
    """

    def __init__(
        self,
        name: str,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        worker: Sequence[str] = WORKER,
    ) -> None:
        self.name = name
        inherited = {name: value for name, value in os.environ.items() if name != WAITING}
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in close)
        try:
            self.process = subprocess.Popen(
                [Path(shutil.which(python) or python).absolute(), *worker],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                encoding="utf-8",
                env=inherited | QUIET | (environment or {}),
                start_new_session=True,  # with its children it can be killed as one
            )
        except OSError as error:
            self.log.close()
            raise PeerError(f"{python} cannot be started ({error.strerror})") from None
        assert self.process.stdin is not None and self.process.stdout is not None  # PIPE makes both
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _listen(self) -> None:
        """Put every line of output into the queue, then an empty one at the end."""
        with contextlib.suppress(ValueError):  # the pipe was closed under it
            for line in self.stdout:
                self.lines.put(line)
        self.lines.put("")

    def ask(self, what: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            PeerError: the process has died, does not answer in time, or reports an error.
        """
        try:
            self.stdin.write(json.dumps(what) + "\n")
            self.stdin.flush()
            line = self.lines.get(timeout=timeout)
        except (OSError, ValueError):
            line = ""
        except queue.Empty:
            self.process.kill()
            raise PeerError(f"it did not answer within {timeout:.0f} s") from None
        if not line:
            raise PeerError(f"its process ended; it last said: {self.last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise PeerError(f"it answered {line[:80]!r}, which is not JSON") from None
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def last_words(self) -> str:
        """Return the last line that the process printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read()[-4000:].splitlines() if line.strip()]
        return lines[-1][-TAIL:] if lines else "nothing"

    def quit(self) -> int:
        """Ask the process to end. Return its peak memory in bytes, 0 if unknown."""
        try:
            return self.ask({"do": "quit"}, timeout=60).get("peak_bytes", 0)
        except PeerError:
            return 0
        finally:
            self.close()

    def close(self) -> None:
        """Kill the process and its children, whatever their state."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL) if hasattr(os, "killpg") else self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self.stdin.close()
        self.stdout.close()
        self.log.close()
