"""Lesson 13. Suite `replicas`: real engines behind Ray Serve, by router: cache hits, balance, first tokens.

Clients hold several conversations each and take turns between them, so a conversation's next prompt comes long after
its last one. All pools together can hold every conversation, a single one cannot.
"""

import asyncio
import random
import time
from argparse import Namespace
from dataclasses import dataclass
from statistics import median
from typing import Any

from scripts.bench.common import Report
from scripts.bench.options import add_choice
from scripts.bench.turns import percentile

from mini_engine.base.errors import needing
from mini_engine.cli.parser import OneLineParser, at_least
from mini_engine.distributed.replicas.cluster import Cluster
from mini_engine.distributed.replicas.front_server import NEEDED
from mini_engine.engine.answer import TextDelta
from mini_engine.engine.jobs import Answers, Job
from mini_engine.engine.mailbox import merge
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer

ROUTERS = ("round-robin", "default", "score")
REPLICAS, CLIENTS, CONVERSATIONS = 2, 6, 4  # conversations of each client
OPENING, TURN, ANSWER = 192, 64, 8  # tokens
VOCABULARY = 2000


@dataclass(frozen=True)
class Load:
    """The clients' load: each holds CONVERSATIONS at once and takes turns between them."""

    turns: int

    @property
    def blocks(self) -> int:
        """The blocks of 16 tokens that all conversations fill in the end."""
        return CLIENTS * CONVERSATIONS * -(-(OPENING + self.turns * (TURN + ANSWER)) // 16)

    @property
    def findable(self) -> float:
        """The share of all prompt tokens that a single large cache would find: whole blocks of the previous turn."""
        prompts = [OPENING + turn * TURN + (turn - 1) * ANSWER for turn in range(1, self.turns + 1)]
        return sum((size + ANSWER - 1) // 16 * 16 for size in prompts[:-1]) / sum(prompts)


@dataclass(frozen=True)
class Turn:
    """One answer. seconds: to its first token."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_choice(parser, "routers", ROUTERS)
    parser.add_argument(
        "--beta", type=at_least(0), nargs="+", default=(1.0, 0.25), help="weight of load in the score (default: 1 .25)"
    )


def run(args: Namespace) -> Report:
    """Return a row for each router."""
    fleets = needing("mini_engine.distributed.replicas.fleet", NEEDED)
    load = Load(3 if args.quick else 6)
    blocks = max(64, load.blocks * 3 // (2 * REPLICAS))
    with fleets.ray_running(REPLICAS):
        rows = [measure(fleets, config, blocks, load, args.rounds or 3) for config in configs(fleets, args)]
    notes = [
        f"{REPLICAS} replicas of the pocket model with {blocks} blocks each; {CLIENTS} clients hold "
        f"{CONVERSATIONS} conversations of {load.turns} turns each, {load.blocks} blocks in the end",
        f"found: share of prompt tokens in the answering replica's cache, at most {100 * load.findable:.1f} %; "
        "times include Ray's own",
    ]
    return Report("replicas", rows, notes)


def configs(fleets, args: Namespace) -> list[Any]:
    """Return the settings of each row: every router, the score with each beta."""
    found = [fleets.FleetConfig(REPLICAS, 1024, router) for router in args.routers if router != "score"]
    betas = args.beta if "score" in args.routers else ()
    return found + [fleets.FleetConfig(REPLICAS, 1024, "score", beta) for beta in betas]


def measure(fleets, config, blocks: int, load: Load, num_rounds: int) -> dict[str, Any]:
    """Start a fleet, put the load on it `num_rounds` times, end it, and return its row."""
    fleet = fleets.Fleet(serve_options(blocks), config)
    cluster = Cluster(Tokenizer.load(POCKET_DIR), fleet.limits(), config.max_waiting, fleet.ask, fleet.close_session)
    rounds = [asyncio.run(one_round(cluster, load, seed)) for seed in range(num_rounds)]
    computed = asyncio.run(prefill_tokens(fleet))
    fleet.close()
    turns = [turn for turns, _ in rounds for turn in turns]
    waits = [1000 * turn.seconds for turn in turns]
    return {
        "router": f"score, beta {config.beta:g}" if config.router == "score" else config.router,
        "found %": 100 * sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns),
        "max / mean load": max(computed) * len(computed) / sum(computed),
        "TTFT p50 ms": percentile(waits, 50),
        "TTFT p99 ms": percentile(waits, 99),
        "requests/s": median(len(turns) / seconds for turns, seconds in rounds),
    }


def serve_options(blocks: int) -> Namespace:
    """Return the options of `serve` for each replica."""
    from mini_engine.cli import serve

    parser = OneLineParser()
    serve.add_arguments(parser)
    return parser.parse_args(["--num-blocks", str(blocks)])


async def one_round(cluster: Cluster, load: Load, seed: int) -> tuple[list[Turn], float]:
    """Let all clients talk at once. Return every turn, and the seconds for all."""
    started = time.perf_counter()
    clients = (talk(cluster, load, random.Random(f"{seed} {number}")) for number in range(CLIENTS))
    found = await asyncio.gather(*clients)
    return [turn for turns in found for turn in turns], time.perf_counter() - started


async def talk(cluster: Cluster, load: Load, chance: random.Random) -> list[Turn]:
    """Hold a client's conversations. Their tokens are random, so nothing is shared between two of them."""

    def some(count: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(count)]

    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    conversations, turns = [some(OPENING) for _ in range(CONVERSATIONS)], []
    for _ in range(load.turns):
        for conversation in conversations:
            conversation += some(TURN)
            started = time.perf_counter()
            answers = await cluster.submit([Job(list(conversation), params)])
            whole, waited = await read_answer(answers, started)
            turns.append(Turn(len(conversation), whole.num_cached_tokens, waited))
            conversation += whole.token_ids
    return turns


async def read_answer(answers: Answers, started: float) -> tuple[TextDelta, float]:
    """Read an answer to its end. Returns it as one delta, and the seconds from `started` to its first token."""
    whole, waited = TextDelta("", []), None
    async for _, delta in answers:
        whole = merge(whole, delta)
        if waited is None and delta.token_ids:
            waited = time.perf_counter() - started
        if delta.error:
            raise RuntimeError(delta.error)
    assert waited is not None
    return whole, waited


async def prefill_tokens(fleet) -> list[float]:
    """Return the prompt tokens that each replica has computed."""
    texts = [text.decode() for _, text in await fleet.scrape()]
    name = 'mini_engine_tokens_total{phase="prefill"} '
    return [float(line.removeprefix(name)) for text in texts for line in text.splitlines() if line.startswith(name)]
