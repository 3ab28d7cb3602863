"""Course machinery. For suite `hybrid`: times of copies, repeated prompts and decode steps.

Decode is measured after prompts of PROMPT tokens. All contenders run the same random weights in one process.
"""

import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench.runs import hf_step, load_hf, ours, watch
from scripts.bench.turns import READ_BYTES, gather_turns, memory_reader, seconds_of, take_turns

import torch

from mini_engine.assembly import build
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import DTYPES
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.hybrid.fast import FastDeltaNet
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.layers.blocks import PackedFinish
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.model.kinds import state_bytes

PROMPT, NEW = 32, 8
OURS, HF, READ = "ours", "transformers", "read"


def copy_rows(config: HybridConfig, args: Namespace) -> list[dict[str, Any]]:
    """Return the time of `copy_states` and `reset_states`, and of reading as many bytes."""
    dtype = DTYPES[args.dtype]
    pool = GdnPool.for_model(config, 8, dtype=dtype, max_track_slots=8)
    size = state_bytes(config.layers, dtype)
    contenders = {
        "copy_states": lambda: [pool.copy_states(1 + i, 9 + i) for i in range(8)],
        "reset_states": lambda: [pool.reset_states([1 + i]) for i in range(8)],
        READ: memory_reader(),
    }
    timings = take_turns(contenders, args.rounds or (3 if args.quick else 15), "copies")
    rate = READ_BYTES / timings[READ].median
    return [
        {
            "case": f"{name}, {size / 2**20:.1f} MiB",
            "ms": timings[name].median / 8 * 1e3,
            "ms at read speed": touched * size / rate * 1e3,
        }
        for name, touched in (("copy_states", 2), ("reset_states", 1))
    ]


def fast_engine(directory: Path, args: Namespace, batch: int, length: int, **options) -> Engine:
    """Return our engine with its fast parts; its pool holds `batch` sequences of `length` tokens."""
    limits = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=max(512, batch))
    blocks = 2 + 2 * batch * -(-length // 16)
    model = build.load(directory, args.dtype, "cpu")
    return build.build_engine(model, num_blocks=blocks, scheduler_config=limits, **options)


def second_rows(directory: Path, args: Namespace) -> list[dict[str, Any]]:
    """Return the time to the first token of a new prompt, and of the same prompt repeated."""
    lengths = (256,) if args.quick else (256, 1024)
    engine = fast_engine(directory, args, 4, max(lengths) * (args.rounds or 5) * 2, max_track_slots=64)
    rows, chance = [], random.Random(0)
    for length in lengths:
        taken = []
        for _ in range(args.rounds or (1 if args.quick else 3)):
            prompt = chance.choices(range(engine.config.vocab_size), k=length)
            taken.append([seen.first_tokens[0] for seen in watch(ours(engine), [[(prompt, 1)]] * 2)])
        cold, warm = map(statistics.median, zip(*taken, strict=True))
        rows.append({"case": f"{length} tokens", "first ms": cold * 1e3, "again ms": warm * 1e3, "times": cold / warm})
    return rows


def decode_rows(directory: Path, args: Namespace) -> list[dict[str, Any]]:
    """Return our and transformers' decode speed by batch size. Both decode after a prompt of PROMPT tokens."""
    rows = []
    hf = load_hf(directory, args.dtype)
    engine = fast_engine(directory, args, max(args.batches), PROMPT + 4 * NEW, enable_prefix_caching=False)
    config = engine.config
    assert isinstance(config, HybridConfig)
    for batch in args.batches:
        prompts = some_prompts(config, batch)
        contenders = {
            OURS: our_decode(engine, prompts),
            HF: their_decode(hf, prompts),
            READ: partial(seconds_of, memory_reader()),
        }
        timings = gather_turns(contenders, args.rounds or (1 if args.quick else 5), f"{batch} sequences")
        ours, theirs = (timings[name] for name in (OURS, HF))
        limit = READ_BYTES / timings[READ].median / bytes_touched(directory, config, batch, args) * batch
        rows.append(
            {
                "case": f"{batch} sequences",
                "ours tokens/s": batch * NEW / ours.median,
                "transformers tokens/s": batch * NEW / theirs.median,
                "times": theirs.median / ours.median,
                "memory limit tokens/s": limit,
                "of the limit %": 100 * batch * NEW / ours.median / limit,
            }
        )
    return rows


def bytes_touched(directory: Path, config: HybridConfig, batch: int, args: Namespace) -> int:
    """Return the bytes that a decode step must read or write: weights once, K and V, and each state twice."""
    dtype, weights = DTYPES[args.dtype], (directory / "model.safetensors").stat().st_size
    return weights + batch * (2 * state_bytes(config.layers, dtype) + PROMPT * config.kv_bytes_per_token(dtype))


def some_prompts(config: HybridConfig, count: int) -> list[list[int]]:
    """Return random prompts of PROMPT tokens."""
    return [random.Random(i).choices(range(config.vocab_size), k=PROMPT) for i in range(count)]


def begin(engine: Engine, prompts: list[list[int]], max_tokens: int) -> None:
    """End all requests, add these, and run until all of them decode."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    requests = [engine.add_request(f"{i}", prompt, params) for i, prompt in enumerate(prompts)]
    while any(request.is_prefilling for request in requests):
        engine.step()


def our_decode(engine: Engine, prompts: list[list[int]]) -> Callable[[], float]:
    """Return a run of NEW decode steps after the prompts."""

    def run() -> float:
        begin(engine, prompts, 3 * NEW)
        return seconds_of(lambda: [engine.step() for _ in range(NEW)])

    return run


def their_decode(hf, prompts: list[list[int]]) -> Callable[[], float]:
    """Return a run of NEW decode steps of transformers after the prompts, with its own cache."""

    @torch.inference_mode()
    def run() -> float:
        logits, cache = hf_step(hf, torch.tensor(prompts), logits_to_keep=1)
        tokens = logits[:, -1:].argmax(-1)
        begun = time.perf_counter()
        for _ in range(NEW):
            logits, _ = hf_step(hf, tokens, cache)
            tokens = logits[:, -1:].argmax(-1)
        return time.perf_counter() - begun

    return run


def step_rows(directory: Path, args: Namespace) -> list[dict[str, Any]]:
    """Return the processor time of a decode step and of its largest parts, medians, by batch size.

    "feed-forward" includes each mixer's last matrix.
    """
    rounds = 4 if args.quick else 3 * (args.rounds or 7)
    length = PROMPT + rounds + 4
    engine = fast_engine(directory, args, max(args.batches), length, enable_prefix_caching=False)
    runner = engine.runner
    assert isinstance(runner, ModelRunner) and isinstance(engine.config, HybridConfig)
    if not any(isinstance(module, PackedFinish) for module in runner.model.modules()):
        raise UserError("the part 'step' measures lesson 9's packed layers, which do not work here; leave it out")
    watch = Stopwatch()
    parts = {PackedFinish: "feed-forward ms", FastDeltaNet: "delta nets ms", PackedLinear: "other matrices ms"}
    for module in runner.model.modules():  # of single matrices, only the head is called
        if part := parts.get(type(module)):
            watch.over(module, "forward", part)
    rows, read = [], memory_reader()
    for batch in args.batches:
        begin(engine, some_prompts(engine.config, batch), rounds + 2)
        engine.step()
        taken, reads = [], []
        for _ in range(rounds):
            taken.append(watch.of(engine.step))
            reads.append(Stopwatch().of(read)["CPU ms"])
        limit = bytes_touched(directory, engine.config, batch, args) / READ_BYTES * statistics.median(reads) * 1e3
        medians = {name: statistics.median(one[name] for one in taken) * 1e3 for name in taken[0]}
        rows.append({"case": f"{batch} sequences"} | medians | {"memory limit ms": limit})
    return rows


class Stopwatch:
    """Adds up the processor time of a step's parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def over(self, owner: Any, method: str, part: str) -> None:
        """Count the time of every later call of `owner`'s method under the name `part`."""
        inner = getattr(owner, method)
        self.seconds[part] = 0.0

        def call(*arguments):
            begun = time.process_time()
            result = inner(*arguments)
            self.seconds[part] += time.process_time() - begun
            return result

        setattr(owner, method, call)

    def of(self, step: Callable[[], Any]) -> dict[str, float]:
        """Run a step; return the seconds of the whole, of each part, and of everything else."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        begun = time.process_time()
        step()
        whole = time.process_time() - begun
        return {"CPU ms": whole} | self.seconds | {"else ms": whole - sum(self.seconds.values())}
