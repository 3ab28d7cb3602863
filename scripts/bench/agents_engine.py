"""Lesson 20. Part `engine` of suite `agents`: turns of agents beside a crowd, on the running engine, by policy.

Agents take turns; after each turn one-off questions arrive, while the agent's tool runs. All policies answer the same
prompts, in interleaved rounds, each on an engine of its own with a pool that holds only some of the agents' texts.
"""

import random
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from scripts.bench.turns import with_progress

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.choices import with_layers
from mini_engine.assembly.loading import load
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.pocket import POCKET_DIR

BLOCK_SIZE, POOL_BLOCKS = 16, 512
SYSTEM, TASK, RESULT, ANSWER, QUESTION = 128, 512, 64, 16, 256  # tokens
TURNS, CROWD = 6, 2  # turns of an agent; questions after each turn
COUNTS = (4, 6, 8, 12)
POLICIES: dict[str, dict[str, Any]] = {
    "LRU": {},
    "SLRU": {"eviction_policy": "slru"},
    "TLRU": {
        "eviction_policy": "tlru",
        "tlru_threshold": 2 * RESULT,
        "tlru_next_prompt_estimate": RESULT,
    },
    "sessions": {"enable_sessions": True},
}


@dataclass
class Turn:
    """A prompt, and the agent whose turn it is; None for a question of the crowd."""

    ids: list[int]
    agent: int | None


def turns(num_agents: int, vocab_size: int, num_turns: int, seed: int = 0) -> Iterator[Turn]:
    """Yield the prompts in the order of their arrival. An answer is made up: no policy may change what comes next."""
    chance, ids = random.Random(seed), range(vocab_size)
    system = chance.choices(ids, k=SYSTEM)
    texts = [system + chance.choices(ids, k=TASK) for _ in range(num_agents)]
    for _ in range(num_turns):
        for agent in range(num_agents):
            yield Turn(list(texts[agent]), agent)
            texts[agent] += chance.choices(ids, k=ANSWER + RESULT)
            for _ in range(CROWD):
                yield Turn(chance.choices(ids, k=QUESTION), None)


class Contender:
    """An engine with a policy.

    found, asked: tokens that later turns of agents found, and those of their prompts. seconds: until their first token.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.found = self.asked = self.number = 0
        self.seconds: list[float] = []

    def answer(self, turn: Turn, is_later: bool) -> None:
        """Answer a prompt, and count it if it is a later turn of an agent."""
        self.number += 1
        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        session = None if turn.agent is None else f"agent-{turn.agent}"
        begun = time.perf_counter()
        request = self.engine.add_request(str(self.number), turn.ids, params, session=session)
        while not request.output_ids:
            self.engine.step()
        first = time.perf_counter() - begun
        while not request.is_finished:
            self.engine.step()
        if is_later:
            self.found += request.num_cached_tokens
            self.asked += len(turn.ids)
            self.seconds.append(first)


def engine(args: Namespace) -> tuple[list[dict], str]:
    """Return a row for each number of agents and policy, on the pocket model."""
    counts = (4, 8) if args.quick else COUNTS
    rounds = args.rounds or (1 if args.quick else 3)
    rows = [
        row
        for count in with_progress(counts, "engine")
        for row in measure(load(POCKET_DIR, "float32", "cpu"), count, rounds)
    ]
    said = (
        f"the pocket model on this machine, {POOL_BLOCKS} blocks of {BLOCK_SIZE} tokens; agents with {SYSTEM + TASK} "
        f"tokens at first and {ANSWER + RESULT} more a turn, {TURNS} turns; {CROWD} questions of {QUESTION} tokens "
        f"after each turn; {rounds} rounds"
    )
    return rows, said


def measure(model: Any, num_agents: int, rounds: int, num_turns: int = TURNS) -> list[dict]:
    """Return a row for each policy: the agents' share of tokens found, and the time to the first token of a turn."""
    found = {name: [0, 0] for name in POLICIES}
    seconds: dict[str, list[float]] = {name: [] for name in POLICIES}
    model = with_layers(model, "auto")
    shape = {"backend": "reference", "num_blocks": POOL_BLOCKS + 1, "block_size": BLOCK_SIZE}  # layers as they are
    for number in range(rounds):
        engines = {name: Contender(build_engine(model, **shape, **options)) for name, options in POLICIES.items()}
        begun: set[int | None] = set()
        for turn in turns(num_agents, model.config.vocab_size, num_turns, seed=number):
            for contender in engines.values():  # in turn, so that a busy moment strikes all of them
                contender.answer(turn, turn.agent in begun)
            begun |= {turn.agent} - {None}
        for name, contender in engines.items():
            found[name][0] += contender.found
            found[name][1] += contender.asked
            seconds[name] += contender.seconds
    return [
        {
            "agents": str(num_agents),
            "policy": name,
            "hits %": 100 * found[name][0] / found[name][1],
            "first token p50 ms": 1000 * median(seconds[name]),
            "p95 ms": 1000 * sorted(seconds[name])[int(0.95 * len(seconds[name]))],
        }
        for name in POLICIES
    ]
