"""Lesson 19. Suite `handover`: the gap between two tokens of running answers while a long prompt is computed.

    one process      the prompts in one step each, in lesson 5's chunks, and in small ones; torch has two threads
    hand-over        one prefill worker computes them; both processes have one thread

A prompt arrives every few seconds, the same in all ways, which take turns. Gaps count from its arrival to its first
token; `idle` is the median of the gaps in between. A second table has the transfers.
"""

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.common import Report
from scripts.bench.options import add_checkpoint, checkpoint_of
from scripts.bench.turns import percentile, with_progress

import torch

from mini_engine.assembly.build import build_engine, prefill_workers
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.loading import load
from mini_engine.cli.parser import whole_number
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.qwen3 import load_model
from mini_engine.handover.receiver import ReceivingConnector
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.layers.fast_model import speed_up

ANSWERS, BEHIND, BLOCK, THREADS = 4, 32, 16, 2
LEAD = 0.25  # of the time between two prompts, before the first one
ROOM = 4096  # of a step, and of a chunk, where a prompt is computed at once
CHUNKS = {"no chunks": ROOM, "chunks of 512": 512, "chunks of 128": 128}
HANDED = "hand-over"
WARM_UP = (-1, -2)  # seeds of the prompts that each way first computes alone, as a warm-up; the last one is timed
Row = dict[str, Any]


@dataclass
class Turn:
    """The measurements of one way in a turn, in seconds."""

    gaps: list[float] = field(default_factory=list)  # while a prompt was being computed
    idle: list[float] = field(default_factory=list)  # while none was
    firsts: list[float] = field(default_factory=list)


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_checkpoint(parser, "small")
    parser.add_argument(
        "--tokens", type=whole_number(64), default=2000, metavar="N", help="of a prompt (default: 2000)"
    )
    parser.add_argument("--prompts", type=whole_number(1), metavar="N", help="in a turn (default: 3; quick: 1)")


def run(args: Namespace) -> Report:
    """Let the ways take turns."""
    path, rounds = checkpoint_of(args), args.rounds or (1 if args.quick else 3)
    args.prompts = args.prompts or (1 if args.quick else 3)
    torch.set_num_threads(THREADS)
    with ExitStack() as stack:
        ways = dict(stack.enter_context(each_way(path, args)))
        seconds = {name: alone(engine, args) for name, engine in ways.items()}
        pause = 3 * seconds["no chunks"]
        turns: dict[str, list[Turn]] = {name: [] for name in ways}
        for number in with_progress(range(rounds), "rounds"):
            for name, engine in ways.items():
                turns[name].append(taken(engine, threads_of(name), args, pause, number))
        transfers = transferred(ways[HANDED], args)
    notes = [
        f"{path.name} in {args.dtype}: {ANSWERS} answers run, and {args.prompts} prompts of {args.tokens} tokens "
        f"arrive in each turn, one every {pause:.1f} s; {rounds} turns of each way, alternating",
        f"one process has {THREADS} threads; with hand-over, each of two processes has one; "
        f"each way first computed {len(WARM_UP)} prompts alone",
    ]
    return Report("handover", [row(name, found) for name, found in turns.items()], notes, more=transfers)


def threads_of(name: str) -> int:
    """Return torch's threads in the process that answers."""
    return 1 if name == HANDED else THREADS


@contextmanager
def each_way(path: Path, args: Namespace) -> Iterator[dict[str, Engine]]:
    """Yield an engine for each way; the worker's process ends with the context."""
    model = speed_up(load_model(path, getattr(torch, args.dtype)))
    ways = {name: build_engine(model, config_of(args, chunk, 0)) for name, chunk in CHUNKS.items()}
    config = config_of(args, 512, 1)
    with prefill_workers(path, config, args.dtype, "cpu") as workers:
        engine = build_engine(load(path, args.dtype, "cpu"), config, workers=workers)
        try:
            yield ways | {HANDED: engine}
        finally:
            connector_of(engine).shutdown()


def config_of(args: Namespace, chunk: int, num_workers: int) -> EngineConfig:
    """Return an engine's options. A step has room for a chunk and for each answer's token."""
    limits = SchedulerConfig(max_num_batched_tokens=chunk + ANSWERS, max_num_seqs=16, chunked_prefill_size=chunk)
    num_blocks = 2 * (args.tokens + ROOM) // BLOCK
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=BLOCK,
        scheduler_config=limits,
        prefill_workers=num_workers,
        handover_bytes=2**29 if num_workers else None,
    )


def connector_of(engine: Engine) -> ReceivingConnector:
    """Return the connector of an engine with prefill workers."""
    connector = cache_of(engine.scheduler.manager).connector
    assert isinstance(connector, ReceivingConnector)
    return connector


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Return a prompt that shares no beginning with any other."""
    return torch.randint(1000, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(engine: Engine, args: Namespace) -> float:
    """Return the seconds that a prompt takes with nothing else running, after one to warm up."""
    for seed in WARM_UP:
        begun = time.perf_counter()
        request = engine.add_request("alone", prompt_of(seed, args.tokens), SamplingParams(temperature=0, max_tokens=1))
        while not request.output_ids:
            engine.step()
    return time.perf_counter() - begun


def taken(engine: Engine, threads: int, args: Namespace, pause: float, number: int) -> Turn:
    """Let answers run and prompts arrive; return the gaps between tokens and the times of first tokens."""
    torch.set_num_threads(threads)
    turn, long = Turn(), SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
    answers = [engine.add_request(f"a{i}", prompt_of(10**6 + 100 * number + i, BEHIND), long) for i in range(ANSWERS)]
    while not all(answer.output_ids for answer in answers):
        engine.step()
    last = time.perf_counter()
    due = [last + pause * (index + LEAD) for index in range(args.prompts)]
    waiting: dict[str, float] = {}
    while due or waiting:
        now = time.perf_counter()
        if due and now >= due[0]:
            name = f"p{len(due)}"
            waiting[name] = due.pop(0)
            seed = 10 * number + len(due)
            engine.add_request(name, prompt_of(seed, args.tokens), SamplingParams(temperature=0, max_tokens=1))
        result = engine.step()
        now = time.perf_counter()
        (turn.gaps if waiting else turn.idle).append(now - last)
        last = now
        turn.firsts += [now - waiting.pop(one.id) for one in result.finished if one.id in waiting]
    for answer in answers:
        engine.abort(answer.id)
    engine.step()
    return turn


def row(name: str, turns: list[Turn]) -> Row:
    """Return a way's row: gaps of all turns, how many for each prompt, and the range of the p99 over turns."""
    gaps = [1e3 * gap for turn in turns for gap in turn.gaps]
    idle = [1e3 * gap for turn in turns for gap in turn.idle]
    tails = [1e3 * percentile(turn.gaps, 99) for turn in turns]
    firsts = [first for turn in turns for first in turn.firsts]
    return {
        "prompts": name,
        "idle ms": median(idle),
        "p50 ms": percentile(gaps, 50),
        "p99 ms": median(tails),
        "from": min(tails),
        "to": max(tails),
        "p99.9 ms": percentile(gaps, 99.9),
        "max ms": max(gaps),
        "gaps a prompt": len(gaps) / len(firsts),
        "first s": median(firsts),
        "tokens/s": 1e3 * ANSWERS * len(gaps) / sum(gaps),
    }


def transferred(engine: Engine, args: Namespace) -> list[Row]:
    """Return the times of the transfers, and of copying a prompt's blocks. The engine is unusable afterwards."""
    connector = connector_of(engine)
    counts = connector.stats[0].events
    blocks = list(range(1, 1 + (args.tokens - 1) // BLOCK))
    into, out = [], []
    for _ in range(5):
        begun = time.perf_counter()
        for index, payload in enumerate(connector.blocks.read(blocks)):
            connector.stage.write(index, payload)
        middle = time.perf_counter()
        connector.blocks.write(blocks, [connector.stage.read(index) for index in range(len(blocks))])
        into.append(middle - begun)
        out.append(time.perf_counter() - middle)
    transfers = max(1, counts["transfers"])
    return [
        {
            "transfers": str(counts["transfers"]),
            "computed here": counts["fallbacks"],
            "MiB each": counts["bytes"] / transfers / 2**20,
            "asked to used s": counts["milliseconds"] / transfers / 1e3,
            "copy in ms": 1e3 * median(into),
            "copy out ms": 1e3 * median(out),
        }
    ]
