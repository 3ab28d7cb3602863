"""Lesson 13. Suite `parallel`: a step of one process beside the same step of two that share the model.

    decode, prefill  one process with one thread, one with two, two ranks with one each, in turn; and one process with
                     the layers that ranks have, which leave room for an exchange, but nobody to exchange with
    exchange         all-reduces and bytes of a step, counted, beside what the shapes say; the share of its time. The
                     last layer adds up only the rows whose logits are needed

All contenders run lesson 9's layers in float32. The second rank sleeps while the first runs alone.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from scripts.bench.common import Report
from scripts.bench.turns import take_turns

import torch
import torch.distributed as dist

from mini_engine.build import assemble, build_engine, over_ranks, start_ranks
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.checkpoint.weights import load_model
from mini_engine.distributed.ranks.processes import Ranks
from mini_engine.distributed.ranks.shard import bytes_per_step
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import SchedulerConfig
from mini_engine.engine_config import EngineConfig
from mini_engine.layers import speed_up
from mini_engine.layers.exchange import whole
from mini_engine.pocket import POCKET_DIR

BATCHES = (1, 8)
HISTORY, PREFILL, STEPS = 32, 256, 4
BLOCK = 16
Row = dict[str, Any]


class Contender(NamedTuple):
    """A way to run the model. threads: torch's, in rank 0."""

    name: str
    threads: int
    make: Callable[[EngineConfig], Engine]


def run(args: Namespace) -> Report:
    """Time the steps, and count their exchange."""
    with start_ranks(str(POCKET_DIR), EngineConfig(tensor_parallel_size=2), torch.float32)[0] as ranks:
        rows, exchange = timed(ranks, args), exchanged(ranks)
    notes = [
        "the pocket model in float32, lesson 9's layers",
        f"decode behind {HISTORY} tokens; prefill of {PREFILL}; × is the time beside one rank with one thread",
        *map(sentence, exchange),
    ]
    return Report("parallel", rows, notes)


def contenders_for(ranks: Ranks) -> list[Contender]:
    """Return the ways to run the model."""
    alone = partial(build_engine, speed_up(load_model(POCKET_DIR)))
    divisible = speed_up(load_model(POCKET_DIR), exchange=whole)
    return [
        Contender("1 process, 1 thread", 1, alone),
        Contender("1 process, 2 threads", 2, alone),
        Contender("1 process, a rank's layers", 1, lambda config: assemble(divisible, config, None)),
        Contender("2 ranks, 1 thread each", 1, partial(over_ranks, ranks)),
    ]


def timed(ranks: Ranks, args: Namespace) -> list[Row]:
    """Time decode steps at each batch, and a prefill, the contenders in turn."""
    rows, rounds = [], args.rounds or (5 if args.quick else 15)
    contenders = contenders_for(ranks)
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
    """Return an engine that shares no prefixes, with room for so many tokens."""
    limits = SchedulerConfig(max_num_batched_tokens=1024, chunked_prefill_size=1024, watermark=0.0)
    num_blocks = 2 + 2 * -(-num_tokens // BLOCK)
    config = EngineConfig(num_blocks=num_blocks, block_size=BLOCK, scheduler_config=limits, enable_prefix_caching=False)
    return one.make(config)


def decoder(one: Contender, batch: int, rounds: int) -> Callable[[], None]:
    """Return a call of STEPS decode steps of so many requests, behind their prompts."""
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


class Counter:
    """Counts all-reduces, their bytes, and the seconds until their sums are there."""

    def __init__(self) -> None:
        self.calls, self.bytes, self.seconds, self.all_reduce = 0, 0, 0.0, dist.all_reduce

    def __call__(self, x: torch.Tensor) -> None:
        """Stand in for `dist.all_reduce`."""
        begun = time.perf_counter()
        self.all_reduce(x)
        self.seconds += time.perf_counter() - begun
        self.calls += 1
        self.bytes += x.nbytes


def exchanged(ranks: Ranks) -> list[Row]:
    """Count the exchange of a decode step at each batch, and of a prefill."""
    rows = []
    torch.set_num_threads(1)
    one = Contender("counted", 1, partial(over_ranks, ranks))
    cases = [(f"decode, {batch} at once", batch, decoder(one, batch, 2), STEPS) for batch in BATCHES]
    for title, tokens, call, steps in [*cases, (f"prefill, {PREFILL} tokens", PREFILL, prefiller(one), 1)]:
        call()
        counter, begun = Counter(), time.perf_counter()
        with mock.patch.object(dist, "all_reduce", counter):
            call()
        taken = time.perf_counter() - begun
        rows.append(
            {
                "step": title,
                "all-reduces": counter.calls / steps,
                "bytes": counter.bytes / steps,
                "theory": bytes_per_step(ranks.model.config, tokens, 4),
                "share": counter.seconds / taken,
                "µs a call": 1e6 * counter.seconds / counter.calls,
            }
        )
    return rows


def sentence(row: Row) -> str:
    """Say what a step exchanged."""
    return (
        f"{row['step']}: {row['all-reduces']:g} all-reduces of {row['bytes'] / 2**10:g} KiB together "
        f"(theory: at most {row['theory'] / 2**10:g}), {row['share']:.0%} of the step, {row['µs a call']:.0f} µs each"
    )


def weight_bytes(config: Qwen3Config, itemsize: int) -> int:
    """Return the bytes of the layers' matrices, which ranks share."""
    width, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    layer = 2 * width * heads * config.head_dim + 3 * width * config.intermediate_size
    return itemsize * config.num_hidden_layers * layer
