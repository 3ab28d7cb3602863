"""Lesson 13. Several engines behind a router: the same tokens, wherever a prompt is answered.

Every path is compared with Hugging Face. A path that did not do what it is named for is reported as not exercised.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial

from scripts.smoke.arguments import make_parser
from scripts.smoke.run import Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.trial import Trial, lost_blocks

from mini_engine.cli.parser import whole_number
from mini_engine.distributed.routing.policy import Policy, PrefixScore, RoundRobin
from mini_engine.distributed.routing.retry import ReplicaLost, with_retries
from mini_engine.engine.request import Request
from mini_engine.pocket import COURSE_PROMPTS


class Replicas(Trial):
    """Engines with separate caches. places: the number of the engine that each request went to."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.engines = [self.engine() for _ in range(self.args.replicas)]
        self.places: list[int] = []

    def answer(self, policy: Policy[int], ids: list[int]) -> Request:
        """Send a prompt to the engine that the policy chooses. Load is the number of requests it has had."""
        size, had = self.args.block_size, Counter(self.places)
        keys = [tuple(ids[:end]) for end in range(size, len(ids) + 1, size)]
        place = policy.choose(keys, {i: had[i] for i in range(len(self.engines))})
        policy.sent(place, keys)
        self.places.append(place)
        [request] = self.ask(self.engines[place], [ids])
        policy.found(place, keys, request.num_cached_tokens // size)
        return request

    def outcome_of(self, requests: list[Request]) -> Outcome:
        """Return the answers, and the faults of all engines."""
        done = self.outcome(self.engines[0], requests)
        done.faults += [fault for engine in self.engines[1:] for fault in lost_blocks(engine)]
        num_bytes = sum(engine.runner.pool.bytes for engine in self.engines)
        done.kv = {"layout": f"block-tensor in {len(self.engines)} engines", "bytes": num_bytes}
        return done.exercising(len(set(self.places)) > 1, "one engine answered everything")


def by_turns(trial: Replicas, policy=RoundRobin) -> Outcome:
    """Send all prompts to the engines in turn, then all of them again; return the second answers."""
    rule = policy()
    first, second = ([trial.answer(rule, ids) for ids in trial.prompts] for _ in range(2))
    done = trial.outcome_of(second)
    if [request.output_ids for request in first] != done.outputs:
        done.faults.append("the second answers differ from the first")
    return done


def routed(trial: Replicas) -> Outcome:
    """Send the prompts by score; the second time each goes to the engine that has its prefix."""
    done = by_turns(trial, PrefixScore)
    return done.exercising(any(one.num_cached_tokens for one in trial.requests), "no engine found a prefix")


def retried(trial: Replicas) -> Outcome:
    """Lose the first attempt at each answer before its first token; another engine answers."""
    policy, lost = RoundRobin(), []

    async def attempt(ids: list[int]) -> AsyncGenerator[Request, None]:
        request = trial.answer(policy, ids)
        if ids not in lost:
            lost.append(ids)
            raise ReplicaLost
        yield request

    async def answer(ids: list[int]) -> Request:
        [request] = [request async for request in with_retries(partial(attempt, ids))]
        return request

    done = trial.outcome_of([asyncio.run(answer(ids)) for ids in trial.prompts])
    return done.exercising(len(trial.places) > len(trial.prompts), "no attempt was lost")


def arguments():
    parser = make_parser(__doc__, block_size=8)
    how_many = {"type": whole_number(1), "default": 2, "metavar": "N"}
    parser.add_argument("--replicas", **how_many, help="engines behind the router (default: 2)")
    return parser


def main(argv=None) -> int:
    paths = {"routed": routed, "by turns": by_turns, "retried": retried}
    return run_paths(13, Replicas, paths, arguments(), argv, COURSE_PROMPTS[-5:])


if __name__ == "__main__":
    sys.exit(main())
