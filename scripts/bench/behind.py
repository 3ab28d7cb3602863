"""Course machinery. Schedulers that run without a model, and engines whose requests decode behind a text.

The text is never computed: the scheduler is told that it was, and the pool holds random numbers, which take as long to
read.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

from scripts.bench.turns import Clock, seconds_of

import torch
from torch import nn

from mini_engine.assembly.build import build_engine
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk, Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.manager import KvCacheManager
from mini_engine.model.kinds import Window

STD = 0.02
BLOCK_SIZE, CHUNK = 16, 512


def add_requests(scheduler: Scheduler, jobs: list[tuple[int, int]], first: int = 0) -> list[Request]:
    """Add a request for each prompt length and answer length, with ids from `first` on. No two prompts begin alike."""
    requests = [
        Request(str(i), [1 + i] * prompt, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
        for i, (prompt, answer) in enumerate(jobs, first)
    ]
    for request in requests:
        scheduler.add(request)
    return requests


def without_model(scheduler: Scheduler, vocab_size: int = 100) -> Iterator[list[Chunk]]:
    """Run the scheduler until all requests have ended, each token drawn from these. Yield each step's chunks."""
    chance = random.Random(0)
    while scheduler.requests:
        chunks = scheduler.schedule()
        sampled = [Sampled(chance.randrange(vocab_size), None) for _ in range(sum(chunk.samples for chunk in chunks))]
        scheduler.update(chunks, sampled)
        yield chunks


def prefill(scheduler: Scheduler, batch: int, history: int, answer: int, vocab_size: int = 100) -> None:
    """Add `batch` requests of `history` tokens, and run until all of them decode.

    Raises:
        UserError: the pool is too small.
    """
    add_requests(scheduler, [(history, answer)] * batch)
    for _ in without_model(scheduler, vocab_size):
        if not scheduler.waiting and not any(request.is_prefilling for request in scheduler.running):
            break
    if len(scheduler.running) != batch:
        raise UserError(
            f"{len(scheduler.running)} of {batch} requests decode: the pool is too small for {history} tokens"
        )


def decoding_scheduler(
    running: int, history: int, num_blocks: int | None = None, room: int = 2048, vocab_size: int = 100
) -> Scheduler:
    """Return a scheduler with `running` decoding requests, each with `history` tokens and room for as many more."""
    limits = SchedulerConfig(
        max_num_seqs=running, max_num_batched_tokens=running * history, chunked_prefill_size=history
    )
    scheduler = Scheduler(KvCacheManager(num_blocks or running * ((history + room) // 16 + 1) + 1, 16), limits)
    prefill(scheduler, running, history, room, vocab_size)
    return scheduler


def random_kv(engine: Engine) -> Any:
    """Fill the engine's pool with random numbers, and return it."""
    pool: Any = engine.runner.pool
    kv = pool
    while hasattr(kv, "kv"):
        kv = kv.kv
    for tensor in (*kv.K, *kv.V):
        tensor.normal_()
    return pool


def engine_behind(model: Any, batch: int, history: int, answer: int, **options: Any) -> Engine:
    """Return an engine whose `batch` requests decode after `history` tokens each, and have room for `answer` more."""
    limits = SchedulerConfig(
        max_num_seqs=batch, max_num_batched_tokens=max(CHUNK, batch), chunked_prefill_size=CHUNK, watermark=0.0
    )
    answer += batch * (1 + -(-history // CHUNK))  # the first requests already decode while the others are added
    num_groups = 4 if any(isinstance(kind, Window) for kind in model.config.layers) else 1
    num_blocks = batch * num_groups * -(-(history + answer) // BLOCK_SIZE) + 64
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "scheduler_config": limits}
    engine = build_engine(model, **sizes, enable_prefix_caching=False, **options)
    random_kv(engine)
    prefill(engine.scheduler, batch, history, answer)
    return engine


def decoding(engine: Engine, steps: int, clock: Clock) -> Callable[[], float]:
    """Return a run of some decode steps, which returns its seconds."""
    return lambda: seconds_of(lambda: [engine.step() for _ in range(steps)], clock)


def with_random_weights(model: nn.Module, dtype: torch.dtype) -> Any:
    """Give a model random matrices, and norms of one."""
    for weight in model.parameters():
        nn.init.normal_(weight, std=STD) if weight.dim() > 1 else nn.init.ones_(weight)
    return model.to(dtype).eval().requires_grad_(False)
