"""Lesson 12. Runs prompts cold, then with KV from host memory, disk, a restarted server or a preemption; compacts, too.

Each path reports the number of tokens it did not compute; one that saved none is reported as not exercised.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts import ROOT, first_line
from scripts.smoke.arguments import blocks_for, make_parser, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import LeftOut, drained, run_several

from lessons.l12_tiers.compact import compact, shrink
from mini_engine.assembly.build import build_engine
from mini_engine.assembly.loading import load
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.store import BlockStore

COLD = "cold"
LARGE = 2**30
START_SECONDS = 120


def generate(model, prompts, args) -> Outcome:
    """Run all prompts with empty tiers behind the pool."""
    with temporary() as folder:
        return drained(tiered(model, args, pool_for(prompts, args), folder), prompts, args)


def from_host(model, prompts, args) -> Outcome:
    """Run all prompts, evict everything to the host tier, and run them again."""
    engine = tiered(model, args, pool_for(prompts, args), None)
    drained(engine, prompts, args)
    engine.scheduler.manager.coordinator.clear()
    return restored(engine, drained(engine, prompts, args))


def from_disk(model, prompts, args) -> Outcome:
    """Run all prompts, then again in an engine that has only the directory in common with the first."""
    with temporary() as folder:
        first = tiered(model, args, pool_for(prompts, args), folder)
        drained(first, prompts, args)
        store_of(first).tiers.close()
        second = tiered(model, args, pool_for(prompts, args), folder)
        outcome = restored(second, drained(second, prompts, args))
        found = store_of(second).tiers.num_found["disk"]
        store_of(second).tiers.close()
        return outcome.exercising(found, "nothing was read from the disk")


def after_restart(model, prompts, args) -> Outcome | LeftOut:
    """Ask a server, end its process, start another on the same directory and ask again."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        return f"the server needs the extra 'server' ({error.name} is missing)"
    with temporary() as folder:
        answers, cached = [], 0
        for _ in range(2):
            with server(args, folder) as url:
                replies = [ask(url, ids, args.max_new_tokens) for ids in prompts]
            answers = [ids for ids, _ in replies]
            cached = sum(tokens for _, tokens in replies)
    outcome = Outcome(answers, {"restored_tokens": cached})
    return outcome.exercising(cached, "usage reported no cached tokens after the restart")


def swapped(model, prompts, args) -> Outcome:
    """Run all prompts in a pool so small that requests are preempted and come back."""
    largest = max(blocks_for(prompts, args))
    prompts_alone = sum(len(ids) // args.block_size + 1 for ids in prompts)  # no room for the answers
    engine = tiered(model, args, 1 + max(largest, prompts_alone), None, SchedulerConfig(watermark=0.0))
    scheduler = engine.scheduler
    manager, tree = scheduler.manager, cache_of(scheduler.manager).prefixes.tree
    free = manager.free

    def free_and_forget(request_id: str, computed_ids=()) -> None:
        free(request_id, computed_ids)
        tree.evict(tree.num_evictable)  # as other requests would, sooner or later

    manager.free = free_and_forget
    outcome = restored(engine, drained(engine, prompts, args))
    return outcome.exercising(scheduler.num_preemptions, "no request was preempted")


def compacted(model, prompts, args) -> Outcome:
    """Compact the pool after every step, and shrink it by half of the free blocks in mid-decode."""
    engine = tiered(model, args, 2 * pool_for(prompts, args), None)
    manager, step, moved, steps = engine.scheduler.manager, engine.step, [], []

    def step_and_compact():
        result = step()
        steps.append(1)
        if len(steps) == args.max_new_tokens // 2:
            shrink(manager, blocks_of(engine), manager.allocator.num_blocks - manager.allocator.num_free // 2)
        moved.append(compact(manager))
        return result

    drained(engine, prompts[::-1], args)  # leaves the first blocks to prefixes that are evicted next
    tree = cache_of(manager).prefixes.tree
    tree.evict(tree.num_evictable // 2)
    engine.step = step_and_compact
    outcome = drained(engine, prompts, args)
    outcome.kv["moved_blocks"] = sum(moved)
    return outcome.exercising(sum(moved), "no block was moved")


PATHS = {
    "host": from_host,
    "disk": from_disk,
    "restart": after_restart,
    "swapped": swapped,
    "compacted": compacted,
}


def tiered(model, args, num_blocks: int, folder: Path | None, config: SchedulerConfig | None = None) -> Engine:
    """Return an engine with tiers. It loads everything it finds on the disk, whether or not that pays here."""
    return build_engine(
        model,
        backend="reference",
        num_blocks=num_blocks,
        block_size=args.block_size,
        scheduler_config=config,
        kv_cache_dir=folder,
        kv_host_bytes=LARGE,
        kv_disk_bytes=LARGE if folder else None,
        kv_always=True,
    )


def blocks_of(engine: Engine) -> KvPool:
    """Return the pool of blocks; a hybrid also has one of states."""
    return getattr(engine.runner.pool, "kv", engine.runner.pool)


def store_of(engine: Engine) -> BlockStore:
    """Return the tiers behind the engine's pool."""
    connector = cache_of(engine.scheduler.manager).connector
    assert isinstance(connector, TierConnector)  # `tiered` makes no other
    return connector.block_store


def restored(engine: Engine, outcome: Outcome) -> Outcome:
    """Add the number of tokens that came back from a tier."""
    outcome.kv["restored_tokens"] = store_of(engine).restored_tokens
    return outcome.exercising(outcome.kv["restored_tokens"], "no token came back from a tier")


def pool_for(prompts, args) -> int:
    """Return a pool that holds all prompts and answers at once, and the null block."""
    return 1 + sum(blocks_for(prompts, args))


@contextmanager
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def server(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Run `mini_engine serve` on a free port; yield its address. Ending it writes the waiting records."""
    options = ["--dtype", args.dtype, "--device", args.device, "--block-size", str(args.block_size), "--port", "0"]
    model = [] if args.model == "pocket" else ["--model", args.model]
    command = [
        sys.executable,
        "-m",
        "mini_engine",
        "serve",
        "--kv-always",
        "--kv-cache-dir",
        str(folder),
        *options,
        *model,
    ]
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


def arguments():
    parser = make_parser(first_line(__doc__), block_size=8)
    parser.set_defaults(load_model=load)  # dense or hybrid: `--model pocket-hybrid`
    return parser


def main(argv=None) -> int:
    from scripts.pocket.prompts import COURSE_PROMPTS

    parser = arguments()
    return run_several(12, (COLD, generate), PATHS, parser, with_prompts(argv, parser, COURSE_PROMPTS[-3:]))


if __name__ == "__main__":
    sys.exit(main())
