"""Lesson 13. Several engines behind a router: the same tokens, wherever a prompt is answered."""

import asyncio
import sys
from functools import partial

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke.arguments import make_parser
from scripts.smoke.run import Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.trial import Trial

from mini_engine.distributed.routing.policy import Policy, PrefixScore, RoundRobin
from mini_engine.distributed.routing.retry import ReplicaLost, with_retries


class Replicas(Trial):
    """Engines with separate caches. places: the number of the engine that each request went to."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.engines, self.places = [self.engine() for _ in range(self.args.replicas)], []
        self.layout = f"block-tensor in {len(self.engines)} engines"

    def answer(self, policy: Policy[int], ids: list[int]):
        """Return the prompt's request, answered by the policy's choice. Load: how many requests an engine has had."""
        size = self.args.block_size
        keys = [tuple(ids[:end]) for end in range(size, len(ids) + 1, size)]
        place = policy.choose(keys, {i: self.places.count(i) for i in range(len(self.engines))})
        policy.sent(place, keys)
        self.places.append(place)
        [request] = self.ask(self.engines[place], [ids])
        policy.found(place, keys, request.num_cached_tokens // size)
        return request

    def done(self, requests) -> Outcome:
        """Return the answers, and the faults of all engines."""
        done = self.outcome(self.engines[0], requests, *self.engines[1:])
        return done.exercising(len(set(self.places)) > 1, "one engine answered everything")


def by_turns(trial: Replicas, policy: Policy[int] | None = None) -> Outcome:
    """Send all prompts to the engines in turn, then all of them again; return the second answers."""
    rule = policy or RoundRobin()
    first, second = ([trial.answer(rule, ids) for ids in trial.prompts] for _ in range(2))
    return trial.done(second).repeating(first, "the second answers differ from the first")


def routed(trial: Replicas) -> Outcome:
    """Send the prompts by score; the second time each goes to the engine that has its prefix."""
    done = by_turns(trial, PrefixScore())
    return done.exercising(any(one.num_cached_tokens for one in trial.requests), "no engine found a prefix")


def retried(trial: Replicas) -> Outcome:
    """Lose the first attempt at each answer before its first token; another engine answers."""
    policy = RoundRobin()

    async def attempt(ids: list[int]):
        request = trial.answer(policy, ids)
        if len(trial.places) % 2:
            raise ReplicaLost
        yield request

    async def answers() -> list:
        return [request for ids in trial.prompts async for request in with_retries(partial(attempt, ids))]

    return trial.done(asyncio.run(answers())).exercising(len(trial.places) > len(trial.prompts), "no attempt was lost")


PATHS = {"routed": routed, "by turns": by_turns, "retried": retried}
arguments = partial(make_parser, __doc__, block_size=8, counts={"--replicas": (2, "engines behind the router")})


def main(argv=None) -> int:
    return run_paths(13, Replicas, PATHS, arguments(), argv, COURSE_PROMPTS[-5:])


if __name__ == "__main__":
    sys.exit(main())
