"""Lesson 12. The paths that smoke scripts of lessons with tiers share: K and V from host memory, disk or a restart.

Each reports the number of tokens that it did not compute; one that saved none is reported as not exercised.
"""

import argparse
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from scripts import ROOT
from scripts.smoke.arguments import tokenizer_of
from scripts.smoke.run import LeftOut, Outcome
from scripts.smoke.trial import Trial

from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.store import BlockStore

LARGE = 2**28  # bytes of a tier
START_SECONDS = 120
HOST = {"kv_host_bytes": LARGE, "kv_always": True}  # whether or not that pays here


def host(trial: Trial, **options) -> Outcome:
    """Run all prompts, drop the pool's cache, and run them again with KV from host memory."""
    engine = trial.engine(**HOST, **options)
    trial.ask(engine)
    engine.scheduler.manager.coordinator.clear()
    before = store_of(engine).restored_tokens
    return restored(trial, engine, trial.ask(engine), before)


def disk(trial: Trial, filler: Callable[..., Engine] | None = None, **options) -> Outcome:
    """Run all prompts, then again in an engine that has only the directory in common with the first.

    Args:
        filler: makes the first engine if it is of another kind.
    """
    with temporary() as folder:
        options |= {"kv_cache_dir": folder, **HOST}
        first = (filler or trial.engine)(**options)
        trial.ask(first)
        store_of(first).tiers.close()
        second = trial.engine(**options)
        done, tiers = restored(trial, second, trial.ask(second)), store_of(second).tiers
        tiers.close()
    return done.exercising(tiers.num_found["disk"], "nothing was read from the disk")


def restored(trial: Trial, engine: Engine, requests: list[Request], before: int = 0) -> Outcome:
    """Return the answers, and the number of tokens that came back from a tier, without those `before`."""
    done = trial.outcome(engine, requests)
    done.kv["restored_tokens"] = store_of(engine).restored_tokens - before
    return done.exercising(done.kv["restored_tokens"], "no token came back from a tier")


def restart(trial: Trial) -> Outcome | LeftOut:
    """Ask a server, end its process, start another on the same directory and ask again."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        return f"the server needs the extra 'server' ({error.name} is missing)"
    if tokenizer_of(trial.args) is None:
        return "the checkpoint has no tokenizer, which a server needs"
    replies: list[tuple[list[int], int]] = []
    with temporary() as folder:
        for _ in range(2):
            with server(trial.args, folder) as url:
                replies = [ask(url, ids, trial.args.max_new_tokens) for ids in trial.prompts]
    cached = sum(num_cached for _, num_cached in replies)
    done = Outcome([ids for ids, _ in replies], {"restored_tokens": cached})
    return done.exercising(cached, "usage reported no cached tokens after the restart")


def store_of(engine: Engine) -> BlockStore:
    """Return the tiers behind the engine's pool."""
    connector = cache_of(engine.scheduler.manager).connector
    connector = getattr(connector, "tiers", connector)  # of several
    assert isinstance(connector, TierConnector)  # these options make no other
    return connector.block_store


def temporary() -> TemporaryDirectory:
    """Return a directory that lasts as long as its `with` block."""
    return TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True)


@contextmanager
def server(args: argparse.Namespace, folder: str) -> Iterator[str]:
    """Run `mini_engine serve` on a free port; yield its address. Ending it writes the waiting records."""
    command = [sys.executable, "-m", "mini_engine", "serve", "--kv-always", "--kv-cache-dir", folder, "--port", "0"]
    command += ["--dtype", args.dtype, "--device", args.device, "--block-size", str(args.block_size)]
    command += ["--model", args.model]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield next(word for word in line.split() if word.startswith("http"))
        finally:
            process.terminate()
            process.wait(START_SECONDS)


def ask(url: str, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], int]:
    """Return an answer's token ids, and the number of prompt tokens that already had KV."""
    body = {"prompt": prompt_ids, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
        reply = json.load(response)
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]
