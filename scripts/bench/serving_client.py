"""Course machinery. For suite `serving`: clients that stream completions from an OpenAI server, and time them.

A client notes when each event with text arrives. Prompts are token ids; the answers' texts are counted and never read.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.server_process import streamed

from mini_engine.base.errors import UserError

MODEL = "bench"  # its name in both servers
MOST_FIRST, MOST_TOKEN = 2.0, 0.15  # seconds in which a good answer's first text comes, and each later token


@dataclass
class Seen:
    """One client's view of its answer: the times of its request and of each event with text, and the token count."""

    asked: float
    events: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def first(self) -> float:
        """The seconds to the first text."""
        return self.events[0] - self.asked

    @property
    def per_token(self) -> float:
        """The average seconds per token after the first event."""
        return (self.events[-1] - self.events[0]) / max(1, self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.events, self.events[1:], strict=False)]


@dataclass(frozen=True)
class Load:
    """Prompts and answers' lengths. at_once: clients that ask again when answered; rate: or arrivals a second."""

    jobs: list[tuple[list[int], int]]
    at_once: int = 0
    rate: float = 0.0


async def ask(url: str, ids: Sequence[int], wanted: int) -> Seen:
    """Stream one completion.

    Raises:
        UserError: the server answered with an error, or ended the answer early.
    """
    options = {"max_tokens": wanted, "temperature": 0, "ignore_eos": True, "stream": True}
    asked = {"model": MODEL, "prompt": list(ids), "stream_options": {"include_usage": True}} | options
    seen = Seen(time.perf_counter())
    async for event in streamed(f"{url}/v1/completions", asked):
        note(event, seen)
    if seen.tokens != wanted or not seen.events:
        raise UserError(f"{url}: {wanted} tokens were wanted and {seen.tokens} came")
    return seen


def note(event: dict[str, Any], seen: Seen) -> None:
    """Record an event that has just arrived."""
    if event.get("choices") and event["choices"][0].get("text"):
        seen.events.append(time.perf_counter())
    if usage := event.get("usage"):
        seen.tokens = usage["completion_tokens"]


async def closed(url: str, load: Load) -> list[Seen]:
    """Run `at_once` clients; each asks again as soon as it is answered, until all jobs are done."""
    jobs = iter(load.jobs)

    async def client() -> list[Seen]:
        return [await ask(url, ids, wanted) for ids, wanted in jobs]  # they share one iterator

    found = await asyncio.gather(*(client() for _ in range(load.at_once)))
    return [seen for one in found for seen in one]


async def open_loop(url: str, load: Load) -> list[Seen]:
    """Send requests as a Poisson process, whatever the server does. The times are the same in every run."""
    chance, begun, when, running = random.Random(0), time.perf_counter(), 0.0, []
    for ids, wanted in load.jobs:
        when += chance.expovariate(load.rate)
        await asyncio.sleep(max(0.0, begun + when - time.perf_counter()))
        running.append(asyncio.create_task(ask(url, ids, wanted)))
    return await asyncio.gather(*running)


def figures(url: str, load: Load) -> dict[str, float]:
    """Run a load against a server and return its clients' figures."""
    begun = time.perf_counter()
    seen = asyncio.run((open_loop if load.rate else closed)(url, load))
    seconds = time.perf_counter() - begun
    firsts, gaps = sorted(one.first for one in seen), sorted(gap for one in seen for gap in one.gaps)
    good = sum(one.first <= MOST_FIRST and one.per_token <= MOST_TOKEN for one in seen)
    return {
        "tokens/s": sum(one.tokens for one in seen) / seconds,
        "first token, p50 ms": 1e3 * statistics.median(firsts),
        "first token, p99 ms": 1e3 * quantile(firsts, 0.99),
        "gap, p50 ms": 1e3 * quantile(gaps, 0.5),
        "gap, p99 ms": 1e3 * quantile(gaps, 0.99),
        "good a second": good / seconds,
    }


def quantile(ordered: list[float], share: float) -> float:
    """Return the smallest number that at least `share` of the ordered ones do not exceed; 0 if there are none."""
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)] if ordered else 0.0
