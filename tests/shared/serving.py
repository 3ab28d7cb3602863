"""Lesson 7. The command `serve` in a process of its own."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.shared.service import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SERVE = "from mini_engine.cli import serve; from mini_engine.cli.parser import OneLineParser, guard; import sys;" + (
    "parser = OneLineParser(prog='serve'); serve.add_arguments(parser); sys.exit(guard(parser, serve.run, None))"
)


def path_with(folder: Path) -> str:
    """A PYTHONPATH with this folder before what it has."""
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


class Process:
    """The command, after some other code. `address` is where it listens."""

    def __init__(self, *arguments: str, before: str = "", **environment: str) -> None:
        usual = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path_with(ROOT), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + SERVE, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | usual | environment,
            cwd=ROOT,
        )

    def wait_for_address(self) -> tuple[str, int]:
        """From the line that it prints when it is ready."""
        line = self.process.stdout.readline()
        found = re.search(r"http://(127\.0\.0\.1):(\d+)/v1", line)
        assert found, f"it printed {line!r}\n{self.process.stderr.read()}"
        self.address = (found[1], int(found[2]))
        return self.address

    def dial(self) -> socket.socket:
        """A connection on which nothing has been sent."""
        return socket.create_connection(self.address, timeout=PATIENCE)

    def end(self) -> tuple[int, str]:
        """Wait for its end: exit code, and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        unwritten = re.search(r"NotImplementedError: (Lesson \d+, task \d+.*)", errors)
        if unwritten:
            raise NotImplementedError(unwritten[1])
        return self.process.returncode, errors


@contextmanager
def serving(*arguments: str, before: str = "") -> Iterator[Process]:
    """A process that listens; it is killed at the end if it still runs."""
    server = Process("--port", "0", *arguments, before=before)
    try:
        server.wait_for_address()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
