"""Lesson 18. Suite `parallel`: a step of one process against the same step of two that share the model.

    decode, prefill  one process with one thread, one with two, and two ranks with one each, connected
                     through shared memory or gloo; all in turn
    exchange         the collectives of a step and their bytes, counted and derived from the shapes; the share of its
                     time. The last layer adds up only the rows whose logits are needed

All contenders run lesson 9's layers. Ranks sleep while others run.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.common import Report
from scripts.bench.options import add_dtype, add_model, model_of
from scripts.bench.turns import take_turns

import torch

from mini_engine.assembly.build import build_engine, over_ranks, start_ranks
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.distributed.tensor_parallel.processes import Ranks
from mini_engine.distributed.tensor_parallel.shard import bytes_per_step, gathered_bytes_per_step
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.qwen3 import load_model
from mini_engine.layers.fast_model import speed_up
from mini_engine.model.causal_lm import CausalLM

BATCHES = (1, 8)
HISTORY, PREFILL, STEPS = 32, 256, 12  # steps in a turn: after the first, other contenders' threads sleep
BLOCK = 16
Row = dict[str, Any]


class Contender(NamedTuple):
    """A way to run the model. threads: torch's, in rank 0."""

    name: str
    threads: int
    make: Callable[[EngineConfig], Engine]


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_model(parser)
    add_dtype(parser, "float32")


def run(args: Namespace) -> Report:
    """Time the steps and count their exchanges."""
    path, dtype = model_of(args), getattr(torch, args.dtype)
    with ExitStack() as stack:
        ranks = {name: started(stack, path, dtype, name) for name in ("memory", "gloo")}
        model = speed_up(load_model(path, dtype))
        rows = timed(contenders_for(model, ranks), args)
        exchange = [row for name, one in ranks.items() for row in exchanged(name, one, dtype)]
    notes = [
        f"{path.name} in {args.dtype}, lesson 9's layers",
        f"decode behind {HISTORY} tokens; prefill of {PREFILL}; × is the time beside one process with one thread",
        *map(sentence, exchange),
    ]
    return Report("parallel", rows, notes)


def started(stack: ExitStack, path: Path, dtype: torch.dtype, transport: str) -> Ranks:
    """Start two ranks, which end with the stack."""
    return stack.enter_context(start_ranks(path, EngineConfig(tensor_parallel_size=2), dtype, transport)[0])


def contenders_for(model: CausalLM, ranks: Mapping[str, Ranks]) -> list[Contender]:
    """Return the ways to run the model."""
    alone = partial(build_engine, model)
    return [
        Contender("1 process, 1 thread", 1, alone),
        Contender("1 process, 2 threads", 2, alone),
        *(Contender(f"2 ranks, {name}", 1, partial(over_ranks, one)) for name, one in ranks.items()),
    ]


def timed(contenders: list[Contender], args: Namespace) -> list[Row]:
    """Time decode steps at each batch, and a prefill, the contenders in turn."""
    rows, rounds = [], args.rounds or (5 if args.quick else 15)
    for batch in BATCHES:
        calls = {one.name: decoder(one, batch, rounds) for one in contenders}
        rows += as_rows(f"decode, {batch} at once", calls, rounds, STEPS)
    calls = {one.name: prefiller(one) for one in contenders}
    return rows + as_rows(f"prefill, {PREFILL} tokens", calls, rounds, 1)


def as_rows(title: str, calls: dict[str, Callable[[], None]], rounds: int, steps: int) -> list[Row]:
    """Time the calls in turn; return a row for each."""
    timings = take_turns(calls, rounds, title)
    first = next(iter(timings.values())).median
    return [
        {
            "step": title,
            "run by": name,
            "ms a step": 1e3 * timing.median / steps,
            "± %": 100 * timing.spread,
            "×": timing.median / first,
        }
        for name, timing in timings.items()
    ]


def engine_of(one: Contender, num_tokens: int) -> Engine:
    """Return an engine that shares no prefixes, with room for `num_tokens` tokens."""
    limits = SchedulerConfig(max_num_batched_tokens=1024, chunked_prefill_size=1024, watermark=0.0)
    num_blocks = 2 + 2 * -(-num_tokens // BLOCK)
    config = EngineConfig(num_blocks=num_blocks, block_size=BLOCK, scheduler_config=limits, enable_prefix_caching=False)
    return one.make(config)


def decoder(one: Contender, batch: int, rounds: int) -> Callable[[], None]:
    """Return a call of STEPS decode steps of `batch` requests, after their prompts."""
    wanted = STEPS * (rounds + 3)
    engine = engine_of(one, batch * (HISTORY + wanted + BLOCK))
    params = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True)
    for index in range(batch):
        engine.add_request(str(index), [1 + index] * HISTORY, params)
    torch.set_num_threads(one.threads)
    engine.step()

    def steps() -> None:
        torch.set_num_threads(one.threads)
        for _ in range(STEPS):
            if len(engine.step().new_tokens) != batch:
                raise RuntimeError(f"{one.name}: a decode step did not advance all {batch} requests")

    return steps


def prefiller(one: Contender) -> Callable[[], None]:
    """Return a call that computes one prompt."""
    engine = engine_of(one, 2 * PREFILL)
    params = SamplingParams(temperature=0, max_tokens=1)

    def prefill() -> None:
        torch.set_num_threads(one.threads)
        request = engine.add_request("one", [1 + i % 97 for i in range(PREFILL)], params)
        engine.step()
        if request.error:
            raise RuntimeError(request.error)

    return prefill


def exchanged(name: str, ranks: Ranks, dtype: torch.dtype) -> list[Row]:
    """Count the collectives of a decode step at each batch, and of a prefill."""
    rows = []
    torch.set_num_threads(1)
    one = Contender("counted", 1, partial(over_ranks, ranks))
    cases = [(f"decode, {batch} at once", batch, batch, decoder(one, batch, 2), STEPS) for batch in BATCHES]
    cases.append((f"prefill, {PREFILL} tokens", PREFILL, 1, prefiller(one), 1))
    for title, tokens, sampled, call, steps in cases:
        call()
        before, config = replace(ranks.collectives.traffic), ranks.model.config
        begun = time.perf_counter()
        call()
        taken, after = time.perf_counter() - begun, ranks.collectives.traffic
        calls, seconds = after.calls - before.calls, after.seconds - before.seconds
        theory = bytes_per_step(config, tokens, dtype.itemsize)
        theory += gathered_bytes_per_step(config, sampled, dtype.itemsize, ranks.num_ranks)
        rows.append(
            {
                "step": f"{name}: {title}",
                "collectives": calls / steps,
                "bytes": (after.bytes - before.bytes) / steps,
                "theory": theory,
                "share": seconds / taken,
                "µs a call": 1e6 * seconds / calls,
            }
        )
    return rows


def sentence(row: Row) -> str:
    """Describe the exchanges of a step."""
    return (
        f"{row['step']}: {row['collectives']:g} collectives of {row['bytes'] / 2**10:g} KiB together "
        f"(theory: at most {row['theory'] / 2**10:g}), {row['share']:.0%} of the step, {row['µs a call']:.0f} µs each"
    )
