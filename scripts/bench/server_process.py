"""Course machinery. A server in a process of its own: started, awaited, ended with its children; and its streams.

A client writes plain HTTP/1.1 on its own connection, so that all servers are judged by the same few lines.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from scripts import ROOT

from mini_engine.base.errors import UserError

START_SECONDS = 600.0


def free_port() -> int:
    """Return a port of this machine that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(
    name: str, command: Sequence[str], url: str, ready: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[str, float]]:
    """Start a server; yield its address and the seconds until its path `ready` answers with 200. End it afterwards.

    Raises:
        UserError: it cannot be started here, ends, or does not answer in time.
    """
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | (environment or {}), stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            raise UserError(f"{command[0]} cannot be started ({error.strerror})") from None
        try:
            while not answers(url + ready):
                if process.poll() is not None or time.perf_counter() - begun > START_SECONDS:
                    log.seek(0)
                    raise UserError(f"{name} does not answer; its last words: {log.read()[-300:].strip()!r}")
                time.sleep(0.02)
            yield url, time.perf_counter() - begun
        finally:
            stop(process)


def answers(url: str) -> bool:
    """Return True if the address answers with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def stop(process: subprocess.Popen) -> None:
    """End a server and its child processes."""
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number) if hasattr(os, "killpg") else process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)


async def streamed(url: str, asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Post a request and yield the events of its answer.

    Raises:
        UserError: the server answered with an error.
    """
    place, body = urlsplit(url), json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**20)
    try:
        head = f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise UserError(f"{url} answered {status.decode().strip()}: {(await reader.read(2000)).decode()[-300:]}")
        async for line in reader:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        writer.close()
