"""Lesson 5. Suite `scheduler`: the cost of a decode step without the model, by batch, history and pool size."""

from collections.abc import Sequence

from scripts.bench.behind import decoding_scheduler
from scripts.bench.common import Report
from scripts.bench.turns import take_turns

import torch

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner, plan_step
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.scheduler import Chunk
from mini_engine.pocket import POCKET_DIR

STEPS = 4  # per measurement
RUNNING, HISTORY = 64, 256
BATCHES = (1, 16, 64, 128, 256)
HISTORIES = (64, 256, 1024, 4096)
POOLS = (20_000, 200_000, 1_000_000)


def deciding(scheduler):
    """Return a contender: STEPS steps of the scheduler alone."""
    sampled = [Sampled(1, None)] * len(scheduler.running)

    def run() -> None:
        for _ in range(STEPS):
            scheduler.update(scheduler.schedule(), sampled)

    return run


class NoModel(ModelRunner):
    """A runner that plans each step and returns fixed logits; it has neither model nor pool."""

    def __init__(self, running: int) -> None:
        self.logits, self.device = torch.zeros(running, 32), torch.device("cpu")

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        plan_step(chunks, 16, self.device)
        return self.logits


def stepping(scheduler):
    """Return a contender: STEPS whole engine steps without the model's own time."""
    engine = Engine(Qwen3Config.from_dir(POCKET_DIR), scheduler, NoModel(len(scheduler.running)))

    def run() -> None:
        for _ in range(STEPS):
            engine.step()

    return run


def run(args) -> Report:
    """Measure microseconds per step, for each batch size, history and pool size."""
    cases = {("running requests", n): (n, HISTORY, None) for n in BATCHES}
    cases |= {("tokens behind each of 64", n): (RUNNING, n, None) for n in HISTORIES}
    cases |= {("blocks in the pool, for 64", n): (RUNNING, HISTORY, n) for n in (POOLS[:2] if args.quick else POOLS)}
    contenders = {}
    for case, shape in cases.items():
        contenders[*case, "decide"] = deciding(decoding_scheduler(*shape))
        contenders[*case, "step"] = stepping(decoding_scheduler(*shape))
    timings = take_turns(contenders, args.rounds or (40 if args.quick else 200), "scheduler")
    rows = [row(case, shape[0], timings[*case, "decide"], timings[*case, "step"]) for case, shape in cases.items()]
    return Report("scheduler", rows, ["a decode step: the scheduler alone, then with plan, sampler and statistics"])


def row(case, running: int, decide, step) -> dict:
    return {
        "by": case[0],
        "number": case[1],
        "µs, scheduler": decide.median / STEPS * 1e6,
        "best": decide.best / STEPS * 1e6,
        "µs a request": decide.median / STEPS / running * 1e6,
        "µs, all but the model": step.median / STEPS * 1e6,
        "± %": decide.spread * 100,
    }
