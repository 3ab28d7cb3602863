"""Course machinery. For suite `peers`: llama.cpp's server as an engine, with clients that stream token ids.

The server runs as its documentation advises for one machine: a thread per core, flash attention, continuous batching,
a slot for each request with its own K and V. On two cores a cache that all slots share (`--kv-unified`), one in
bfloat16, and no flash attention were all slower. Its prompt cache is off between runs and on within one.
"""

import asyncio
import http.client
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.bench.runs import Jobs, Step, Wave, Way
from scripts.bench.server_process import answers, free_port, streamed

ALIGN = 256  # llama.cpp rounds a slot's tokens up to this number
START_SECONDS = 300
GREEDY = {"top_k": 1, "samplers": ["top_k"], "ignore_eos": True, "cache_prompt": True}
Event = tuple[int, float, list[int]]  # the job, the time, its new tokens; without tokens the answer is complete


def binary(home: str, name: str) -> Path:
    """Return a program of a llama.cpp checkout that was built in its folder `build`.

    Raises:
        RuntimeError: it is not there.
    """
    path = Path(home).resolve() / "build" / "bin" / name
    if not path.is_file():
        raise RuntimeError(f"there is no {path}; give a checkout of llama.cpp, built into its folder build")
    return path


def gguf_of(home: str, model: Path) -> Path:
    """Return the checkpoint as a GGUF file beside it, which is written if necessary."""
    path = model.with_name(f"{model.name}.gguf")
    if not path.is_file():
        sys.path.append(str(Path(home) / "gguf-py"))
        from scripts.bench.peer_gguf import write_gguf

        write_gguf(model, path)
    return path


def command(request: dict[str, Any], slots: str) -> list[str]:
    """Return the server's command, without its port. slots: a folder, without which slots cannot be emptied."""
    threads, at_once = str(request["threads"]), request["at_once"]
    each = -(-request["text"] // ALIGN) * ALIGN
    server, model = binary(request["home"], "llama-server"), gguf_of(request["home"], Path(request["model"]))
    batch = ["-b", "2048", "-ub", "512", "-c", str(at_once * each), "-np", str(at_once), "--no-kv-unified"]
    own = ["-m", str(model), "-t", threads, "-tb", threads, "-fa", "on", "--cache-ram", "0"]
    return [str(server), *own, *batch, "--slot-save-path", slots, "--no-ui", "--host", "127.0.0.1"]


def version_of(home: str) -> str:
    """Return what the server says of itself, such as "0.5.0-dev (build 1, commit 0c1e570)"."""
    said = subprocess.run([binary(home, "llama-server"), "--version"], capture_output=True, encoding="utf-8")
    lines = (said.stdout + said.stderr).splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("version")), "of an unknown version")


def load_llama(request: dict[str, Any]) -> tuple[str, int, Way]:
    """Start the server. It is this process's child and ends with its group.

    Raises:
        RuntimeError: it ends or does not answer in time.
    """
    port, begun = free_port(), time.perf_counter()
    slots = f"{Path(request['model']).parent.resolve()}/"
    process = subprocess.Popen([*command(request, slots), "--port", str(port)], stdin=subprocess.DEVNULL)
    while not answers(f"http://127.0.0.1:{port}/health"):
        if process.poll() is not None or time.perf_counter() - begun > START_SECONDS:
            raise RuntimeError("llama-server does not answer; its last words are in the log above")
        time.sleep(0.05)
    pool = request["at_once"] * (-(-request["text"] // ALIGN) * ALIGN) * request["token_bytes"]
    return version_of(request["home"]), pool, llama(port, request["at_once"])


# ---------------------------------------------------------------- its clients


def llama(port: int, num_slots: int) -> Way:
    """Return the way of a running server: a client for each job, all at the same time."""

    def run(jobs: Jobs) -> Iterator[Step]:
        events: queue.Queue[Event | Exception] = queue.Queue()
        threading.Thread(target=lambda: asyncio.run(clients(port, jobs, events)), daemon=True).start()
        tokens: dict[int, list[int]] = {job: [] for job in range(len(jobs))}
        left = len(jobs)
        while left:
            event = events.get()
            if isinstance(event, Exception):
                raise event
            job, when, new = event
            left -= not new
            tokens[job] += new
            yield Step(when, {job: tokens[job]})

    @contextmanager
    def way() -> Iterator[Wave]:
        erase(port, num_slots)
        yield run

    return way


def erase(port: int, num_slots: int) -> None:
    """Empty all slots."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for slot in range(num_slots):
        connection.request("POST", f"/slots/{slot}?action=erase", "{}", {"Content-Type": "application/json"})
        reply = connection.getresponse()
        said = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"llama-server cannot empty slot {slot}: {said.decode()[:200]}")
    connection.close()


async def clients(port: int, jobs: Jobs, events: "queue.Queue[Event | Exception]") -> None:
    """Run all clients. What they see, or why one fails, goes into the queue."""
    try:
        await asyncio.gather(*(client(port, job, *each, events) for job, each in enumerate(jobs)))
    except (OSError, RuntimeError, ValueError) as error:
        events.put(error)


async def client(port: int, job: int, ids: list[int], wanted: int, events: queue.Queue) -> None:
    """Stream one answer's tokens into the queue."""
    asked = {"prompt": ids, "n_predict": wanted, "stream": True, "return_tokens": True} | GREEDY
    async for said in streamed(f"http://127.0.0.1:{port}/completion", asked):
        if said["tokens"] and not said["stop"]:
            events.put((job, time.perf_counter(), said["tokens"]))
    events.put((job, time.perf_counter(), []))
