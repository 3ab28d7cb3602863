"""Lesson 5. Suite `admission`: steps, preemptions and repeated work, by how much room admission reserves. No model.

A second table has the steps to the first tokens where short prompts may overtake long ones, and where they may not.
"""

import random
import statistics
from collections.abc import Iterator
from typing import Any

from scripts.bench.behind import add_requests, without_model
from scripts.bench.common import Report

from mini_engine.engine.sampled import Sampled
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.manager import KvCacheManager

POLICIES = {
    "known tokens, no watermark": dict(watermark=0),
    "known tokens, half a block per running request": dict(watermark=0.5),
    "known tokens, a block per running request": dict(watermark=1),
    "the whole answer": dict(watermark=0, reserve_answers=True),
}
BLOCK_SIZE = 16
REQUESTS, SHARE = 64, 0.25  # of the blocks that all of them need
LONG, ANSWER = 7000, 10  # tokens of a prompt that others wait behind, and of all answers


def load_of(requests: int, seed: int) -> list[tuple[int, int]]:
    """Return (prompt tokens, answer tokens) pairs: mostly short prompts and a few long ones; answers of 10 to 200."""
    chance = random.Random(seed)
    return [(int(chance.lognormvariate(4.5, 0.8)) + 1, chance.randrange(10, 200)) for _ in range(requests)]


def blocks_of(prompt: int, answer: int) -> int:
    return -(-(prompt + answer - 1) // BLOCK_SIZE)


def simulate(load, num_blocks: int, **limits) -> dict[str, float]:
    """Run a load through the scheduler without a model."""
    scheduler = Scheduler(KvCacheManager(num_blocks + 1, BLOCK_SIZE), SchedulerConfig(**limits))
    requests = add_requests(scheduler, load)
    steps = tokens = most = 0
    for chunks in without_model(scheduler):
        steps, tokens = steps + 1, tokens + sum(chunk.stop - chunk.start for chunk in chunks)
        most = max(most, sum(chunk.start < chunk.stop for chunk in chunks))
    once = sum(prompt + answer - 1 for prompt, answer in load)
    return {
        "steps": steps,
        "most running": most,
        "preemptions": scheduler.num_preemptions,
        "most of one request": max(request.num_preemptions for request in requests),
        "computed again, %": 100 * (tokens / once - 1),
    }


def steps_to_first_tokens(jobs: list[tuple[int, int, int]], overtaking: float) -> list[int]:
    """Return how many steps each prompt waits. jobs: step of arrival, prompt tokens and answer tokens, in order."""
    scheduler = Scheduler(KvCacheManager(10_000, BLOCK_SIZE), SchedulerConfig(overtaking=overtaking))
    requests, ends, step = [], {}, 0
    while len(ends) < len(jobs):
        new = [(prompt, answer) for start, prompt, answer in jobs if start == step]
        requests += add_requests(scheduler, new, len(requests))
        chunks, step = scheduler.schedule(), step + 1
        for name in scheduler.update(chunks, [Sampled(1, None)] * sum(chunk.samples for chunk in chunks)):
            ends.setdefault(int(name), step)
    return [ends[place] - start for place, (start, _, _) in enumerate(jobs)]


def overtaking_rows() -> Iterator[dict[str, Any]]:
    """Yield the steps to the first tokens behind four long prompts, first come, first served and with overtaking."""
    long = [(0, LONG, ANSWER)] * 4
    loads = {f"one prompt of {tokens}": [*long, (0, tokens, ANSWER)] for tokens in (4, 400)} | {
        "one of 40 in every step": sorted([*long, *((step, 40, ANSWER) for step in range(60))], key=lambda job: job[0])
    }
    for name, jobs in loads.items():
        for overtaking in (0, SchedulerConfig.overtaking):
            steps = steps_to_first_tokens(jobs, overtaking)
            yield {
                f"behind four of {LONG:,}": name,
                "overtaking": overtaking,
                "its first token": statistics.median(steps[4:]),
                "the first long one's": steps[0],
                "the last long one's": steps[3],
            }


def run(args) -> Report:
    """Measure each policy on the same loads; figures are means over the loads."""
    seeds = range(2 if args.quick else args.rounds or 8)
    rows = []
    for name, limits in POLICIES.items():
        found = []
        for seed in seeds:
            load = load_of(REQUESTS, seed)
            needs = [blocks_of(*job) for job in load]
            found.append(simulate(load, max(max(needs), int(SHARE * sum(needs))), **limits))
        rows.append({"promised": name} | {key: sum(f[key] for f in found) / len(found) for key in found[0]})
    note = f"{REQUESTS} requests at once, a pool of {SHARE:g} of their total need, {len(seeds)} loads"
    return Report("admission", rows, [note], more=list(overtaking_rows()))
