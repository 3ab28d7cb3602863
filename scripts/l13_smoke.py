"""Lesson 13. Several engines behind a router: the same tokens, wherever a prompt is answered.

Every path is compared with Hugging Face. A path that did not do what it is named for is reported as not exercised.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator

from scripts import first_line
from scripts.smoke.arguments import blocks_for, make_parser, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import drained, run_several

from mini_engine.cli.parser import whole_number
from mini_engine.distributed.routing.policy import Policy, PrefixScore, RoundRobin
from mini_engine.distributed.routing.retry import ReplicaLost, with_retries
from mini_engine.engine.engine import Engine
from mini_engine.kv.cache_coordinator import cache_of, caching_manager


class Replicas:
    """Engines with separate caches, and a policy that sends each prompt to one of them.

    Attributes:
        places: the engine of each request so far. faults: their failures.
    """

    def __init__(self, model, prompts, args, policy: Policy[int]) -> None:
        options = options_for(prompts, args)
        self.engines = [Engine.for_model(model, manager=caching_manager, **options) for _ in range(args.replicas)]
        self.policy, self.args = policy, args
        self.places: list[int] = []
        self.faults: list[str] = []

    def answer(self, ids: list[int]) -> list[int]:
        """Return the answer of the engine that the policy chooses. Load is the number of requests it has had."""
        size, had = self.args.block_size, Counter(self.places)
        keys = [tuple(ids[:end]) for end in range(size, len(ids) + 1, size)]
        place = self.policy.choose(keys, {i: had[i] for i in range(len(self.engines))})
        self.policy.sent(place, keys)
        self.places.append(place)
        before = found_tokens(self.engines[place])
        one = drained(self.engines[place], [ids], self.args)
        self.policy.found(place, keys, (found_tokens(self.engines[place]) - before) // size)
        self.faults += one.faults
        return one.outputs[0]

    def twice(self, prompts) -> Outcome:
        """Answer all prompts, then all of them again; return the second answers."""
        first, second = ([self.answer(ids) for ids in prompts] for _ in range(2))
        self.faults += [] if first == second else ["the second answers differ from the first"]
        num_bytes = sum(engine.runner.pool.bytes for engine in self.engines)
        kv = {"layout": f"block-tensor in {len(self.engines)} engines", "bytes": num_bytes}
        outcome = Outcome(second, kv, self.faults)
        return outcome.exercising(len(set(self.places)) > 1, "one engine answered everything")


def routed(model, prompts, args) -> Outcome:
    """Send the prompts by score; the second time each goes to the engine that has its prefix."""
    replicas = Replicas(model, prompts, args, PrefixScore())
    return replicas.twice(prompts).exercising(sum(map(found_tokens, replicas.engines)), "no engine found a prefix")


def by_turns(model, prompts, args) -> Outcome:
    """Send the prompts to the engines in turn."""
    return Replicas(model, prompts, args, RoundRobin()).twice(prompts)


def retried(model, prompts, args) -> Outcome:
    """Lose the first attempt at each answer before its first token; another engine answers."""
    replicas, lost = Replicas(model, prompts, args, RoundRobin()), []

    async def answer(ids: list[int]) -> list[int]:
        async def attempt() -> AsyncGenerator[int, None]:
            tokens = replicas.answer(ids)
            if ids not in lost:
                lost.append(ids)
                raise ReplicaLost
            for token in tokens:
                yield token

        return [token async for token in with_retries(attempt)]

    outcome = Outcome([asyncio.run(answer(ids)) for ids in prompts], {}, replicas.faults)
    return outcome.exercising(len(replicas.places) > len(prompts), "no attempt was lost")


def found_tokens(engine: Engine) -> int:
    """Return the number of prompt tokens found in the engine's tree."""
    return cache_of(engine.scheduler.manager).prefixes.stats.found_tokens


def options_for(prompts, args) -> dict:
    """Return an engine's options for a pool that holds all prompts and answers, and the null block."""
    return {"num_blocks": 1 + 2 * sum(blocks_for(prompts, args)), "block_size": args.block_size}


def arguments():
    parser = make_parser(first_line(__doc__), block_size=8)
    parser.add_argument(
        "--replicas", type=whole_number(1), default=2, metavar="N", help="engines behind the router (default: 2)"
    )
    return parser


def main(argv=None) -> int:
    from scripts.pocket.prompts import COURSE_PROMPTS

    parser = arguments()
    others = {"by turns": by_turns, "retried": retried}
    return run_several(13, ("routed", routed), others, parser, with_prompts(argv, parser, COURSE_PROMPTS[-5:]))


if __name__ == "__main__":
    sys.exit(main())
