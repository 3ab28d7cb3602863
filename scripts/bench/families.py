"""Course machinery. Suite `families`: every family at the same active size, beside transformers, Qwen3 and a limit.

All models decode behind random keys and values, in turns: ours, our Qwen3, and the same checkpoint in transformers,
whose model is called step by step with its own cache, as `generate` does. The limit is what a step reads and computes
(`predicted.py`), at the rates at which memory was read and matrices were multiplied in the same rounds.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from scripts.bench.behind import decoding, prefill, random_kv
from scripts.bench.common import Report
from scripts.bench.histories import filled_cache, their_steps
from scripts.bench.options import add_batches, add_choice
from scripts.bench.predicted import Cost, prompt_costs, step_costs
from scripts.bench.runs import hf_step, load_hf
from scripts.bench.same_size import MODELS, checkpoint
from scripts.bench.turns import (
    MATRIX,
    READ_BYTES,
    Rates,
    Timing,
    gather_turns,
    matrix_product,
    memory_reader,
    seconds_of,
)

import torch

from mini_engine.assembly import build
from mini_engine.cli.parser import whole_number
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig

NEW, PROMPT, POOL = 4, 512, 2**30
DTYPE = torch.bfloat16
OURS, QWEN3, HF, READ, PRODUCT = "ours", "our Qwen3", "transformers", "read", "product"
BATCHES = (1, 8, 16)


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_batches(parser, BATCHES)
    add_choice(parser, "kinds", list(MODELS))
    parser.add_argument("--history", type=whole_number(1), default=256, metavar="N", help="default: 256")
    parser.add_argument("--no-transformers", action="store_true", help="only ours")


def run(args: Namespace) -> Report:
    """Measure each family's decode and a prompt."""
    rounds, rows = args.rounds or (2 if args.quick else 5), []
    engines = {QWEN3: engine_of("Qwen3", args)}
    for name in args.kinds:
        engines[OURS] = engine_of(name, args)
        theirs = None if args.no_transformers else load_hf(checkpoint(name), "bfloat16")
        for batch in args.batches[:1] if args.quick else args.batches:
            rows.append(decode_row(name, engines, theirs, batch, rounds, args.history))
        rows.append(prompt_row(name, engines, theirs, min(rounds, 3)))
    notes = [
        f"random weights in bfloat16, {args.history} tokens before each decode; {torch.get_num_threads()} threads",
        "limit: bytes over the read rate, or operations over the product's, whichever is longer, in the same rounds",
    ]
    return Report("families", rows, notes)


def engine_of(name: str, args: Namespace) -> Engine:
    """Return an engine for the largest batch."""
    most = max(args.batches)
    limits = SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=PROMPT, chunked_prefill_size=PROMPT)
    model = build.load(checkpoint(name), "bfloat16", "cpu")
    engine = build.build_engine(model, kv_bytes=POOL, scheduler_config=limits, enable_prefix_caching=False)
    random_kv(engine)
    return engine


def decode_row(
    name: str, engines: dict[str, Engine], theirs: Any, batch: int, rounds: int, history: int
) -> dict[str, Any]:
    """Return the figures of decode steps of `batch` sequences. theirs: transformers' model, or None."""
    contenders = {}
    for who, engine in engines.items():
        end_all(engine)
        prefill(engine.scheduler, batch, history, 2 * batch + NEW * (rounds + 2))
        contenders[who] = decoding(engine, NEW, perf_counter)
    if theirs:
        _, cache = filled_cache(theirs, history, batch)
        contenders[HF] = partial(seconds_of, their_steps(theirs, cache, batch, repeats=False))
    counted = {who: step_costs(engine.config, batch, history, DTYPE) for who, engine in engines.items()}
    return row_of(name, f"{batch} at once", contenders, counted, rounds, batch, NEW)


def end_all(engine: Engine) -> None:
    """Abort all requests."""
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)


def prompt_row(name: str, engines: dict[str, Engine], theirs: Any, rounds: int) -> dict[str, Any]:
    """Return the figures of a step that computes a prompt."""
    prompt = torch.arange(PROMPT)
    contenders: dict[str, Callable[[], float]] = {
        who: partial(seconds_of, partial(our_prompt, engine, prompt.tolist())) for who, engine in engines.items()
    }
    if theirs:
        contenders[HF] = partial(seconds_of, partial(their_prompt, theirs, prompt[None]))
    counted = {who: prompt_costs(engine.config, PROMPT, DTYPE) for who, engine in engines.items()}
    return row_of(name, f"prompt of {PROMPT}", contenders, counted, rounds, PROMPT, 1)


def our_prompt(engine: Engine, prompt: list[int]) -> None:
    """Compute a prompt in one step of an engine without other requests."""
    end_all(engine)
    engine.add_request("prompt", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    engine.step()


def their_prompt(model: Any, ids: torch.Tensor) -> None:
    """Compute a prompt in transformers."""
    with torch.inference_mode():
        hf_step(model, ids, logits_to_keep=1)


def row_of(
    name: str,
    case: str,
    contenders: dict[str, Callable[[], float]],
    counted: dict[str, dict[str, Cost]],
    rounds: int,
    tokens: int,
    steps: int,
) -> dict[str, Any]:
    """Return a row: the contenders' medians, and how near the limits ours come.

    Args:
        counted: the costs of a step of ours, and of Qwen3. tokens: of a step. steps: of a contender's call.
    """
    rates = {READ: partial(seconds_of, memory_reader()), PRODUCT: partial(seconds_of, matrix_product(DTYPE))}
    timings = gather_turns(contenders | rates, rounds, f"{name}, {case}")
    seconds = {who: timing.median / steps for who, timing in timings.items()}
    found = rates_of(timings)
    shares = {who: 100 * limit_of(costs, found) / seconds[who] for who, costs in counted.items()}
    theirs = seconds.get(HF)
    return {
        "family": name,
        "case": case,
        "tokens/s": tokens / seconds[OURS],
        "± %": timings[OURS].spread * 100,
        "transformers": tokens / theirs if theirs else None,
        "times": theirs / seconds[OURS] if theirs else None,
        "of Qwen3's": seconds[QWEN3] / seconds[OURS],
        "limit, tokens/s": tokens / limit_of(counted[OURS], found),
        "% of limit": shares[OURS],
        "Qwen3's %": shares[QWEN3],
        "read GB/s": found.read / 1e9,
    }


def rates_of(timings: dict[Any, Timing]) -> Rates:
    """Return the machine's rates in these rounds."""
    return Rates(READ_BYTES / timings[READ].median, {"bfloat16": 2 * MATRIX**3 / timings[PRODUCT].median})


def limit_of(costs: dict[str, Cost], rates: Rates) -> float:
    """Return the least seconds of a step with these parts."""
    return sum(cost.seconds(rates, DTYPE) for cost in costs.values())
