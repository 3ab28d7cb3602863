"""Course machinery. Lesson 13's requests: those of lesson 12, each with its time and the length of its answer."""

import random
from pathlib import Path

from scripts.bench.traffic import Chats

from lessons.l13_machines.simulate import Arrival
from lessons.l20_agents.traces import read_lines

# Mooncake's conversation trace: a burst every 3 s, of 10.2 requests on average; answers of 343 tokens on average
BURST_SECONDS, BURST_SIZE = 3.0, 10.2
ANSWER_TOKENS = 343.0


def generated(chats: Chats | None = None, seed: int = 0) -> list[Arrival]:
    """Return generated requests, by time."""
    chance = random.Random(seed)
    return [
        Arrival(BURST_SECONDS * (index // BURST_SIZE), ids, 1 + round(chance.expovariate(1 / ANSWER_TOKENS)))
        for index, ids in enumerate((chats or Chats()).generate(seed))
    ]


def read_arrivals(path: Path) -> list[Arrival]:
    """Return the requests of a trace, by time. Without times, all arrive at once.

    Raises:
        UserError: the file cannot be read, or is not such a trace.
    """
    found = [Arrival(line["timestamp"] / 1000, line["hash_ids"], line["output_length"]) for line in read_lines(path)]
    return sorted(found, key=lambda one: one.seconds)
