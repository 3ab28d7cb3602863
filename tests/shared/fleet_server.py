"""Lesson 13. `mini-engine serve --replicas 2` in a process of its own, and what tests do with it."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.shared.service import Service

PATIENCE = 120.0
SAMPLE = re.compile(r'mini_engine_(\w+)\{.*?replica="(\d+)".*?\} (\S+)')


class FleetServer(Service):
    """The command as a user runs it; requests go through `post`, `get` and tests.shared.service.exchange."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "mini_engine", "serve", "--replicas", "2", "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
        self.printed: list[str] = []
        self.url = self.read_until("serving ").split(" at ")[1].split("/v1")[0]
        self.address = ("127.0.0.1", int(self.url.rsplit(":", 1)[1]))

    def __enter__(self) -> "FleetServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()

    def read_until(self, beginning: str) -> str:
        """Return the next line of output that begins so. AssertionError if the server ends instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            if line.startswith(beginning):
                return line
        raise AssertionError(f"the server ended without {beginning!r}: {''.join(self.printed)}")

    def by_replica(self, name: str, **labels: str) -> dict[str, float]:
        """Return a metric's value for each replica."""
        lines = self.get("/metrics").body.splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [SAMPLE.fullmatch(line) for line in lines if all(text in line for text in wanted)]
        return {one[2]: float(one[3]) for one in found if one and one[1] == name}

    @property
    def is_idle(self) -> bool:
        """Whether no replica has a request or holds a block."""
        names = ("requests_running", "requests_waiting")
        values = [value for name in names for value in self.by_replica(name).values()]
        return not any(values) and not any(self.by_replica("blocks", state="held").values())

    def wait_for(self, what: str, holds: Callable[[], Any]) -> None:
        """Wait until it holds."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, f"it never came about: {what}"
            time.sleep(0.1)

    def wait_until_all_alive(self) -> None:
        """Wait until two replicas take requests."""
        self.wait_for("two replicas are alive", lambda: self.get("/health").body["alive"] == 2)
        self.wait_for("two replicas report", lambda: len(self.by_replica("requests_running")) == 2)

    def replica_pids(self) -> list[int]:
        """Return the processes of this server's replicas. Needs Linux' /proc."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                stat = (folder / "stat").read_text(encoding="utf-8").rsplit(") ", 1)[1].split()
                command = (folder / "cmdline").read_bytes()
            except (OSError, IndexError):  # it has just ended
                continue
            found[int(folder.name)] = (int(stat[1]), stat[0], command)

        def is_ours(pid: int) -> bool:
            return pid == self.process.pid or (pid in found and is_ours(found[pid][0]))

        named = [pid for pid, (_, state, command) in found.items() if b"ServeReplica" in command and state != "Z"]
        return sorted(pid for pid in named if is_ours(pid))
