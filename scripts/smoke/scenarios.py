"""Lesson 8. For its smoke script: requests that share KV, and how much of it was found in the cache."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts.smoke.arguments import blocks_for
from scripts.smoke.run import Outcome
from scripts.smoke.trial import Opened, Trial

from mini_engine.engine.engine import Engine
from mini_engine.kv.cache_coordinator import cache_of

LINE = (
    "{}: {requests} requests, {found_tokens} of {prompt_tokens} prompt tokens found ({hit_rate:.0%}), "
    "{evicted_blocks} blocks evicted, pool of {blocks}"
)


class Scenario(Trial):
    """Requests to one engine, in order. evicts: whether its pool is meant to be too small."""

    shared: Engine
    evicts = False

    def begin(self, prompts: Sequence[list[int]], share: float = 1.0) -> None:
        """Make a pool that holds `share` of the need of all prompts and answers, but at least the largest."""
        needs, self.evicts = blocks_for(prompts, self.args), share < 1
        self.shared = self.engine(num_blocks=1 + max(*needs, int(sum(needs) * share)))

    def counted(self) -> dict[str, Any]:
        """Return how much was found in the cache, and what became of its blocks."""
        manager = self.shared.scheduler.manager
        prefixes = cache_of(manager).prefixes
        return {
            "requests": len(self.requests),
            "prompt_tokens": prefixes.stats.asked_tokens,
            "found_tokens": prefixes.stats.found_tokens,
            "hit_rate": round(prefixes.stats.hit_rate, 3),
            "evicted_blocks": prefixes.tree.num_evicted,
            "blocks": manager.num_usable_blocks,
            "held_at_end": manager.blocks_by_state.held,
        }


def run_scenarios(
    scenarios: Mapping[str, Callable[[Any], None]], kind: type[Scenario], model, prompts, args
) -> Outcome:
    """Run every scenario of this kind; return the answers to all requests, in order, and each scenario's figures."""
    done, figures = Outcome([], {"layout": "block-tensor", "block_size": args.block_size}, prompts=[]), {}
    asked: list[list[int]] = []
    for name, play in scenarios.items():
        trial = kind(name, args, prompts, Opened(), model)
        play(trial)
        found = figures[name] = trial.counted()
        one = trial.outcome(trial.shared, trial.requests)
        one.exercising(found["found_tokens"], "no prompt found a prefix")
        one.exercising(found["evicted_blocks"] or not trial.evicts, "no block was evicted")
        done.take_notes(name, one)
        done.outputs += one.outputs
        asked += [request.prompt_ids for request in trial.requests]
    done.kv |= {name: sum(one[name] for one in figures.values()) for name in ("prompt_tokens", "found_tokens")}
    done.more, done.lines = {"scenarios": figures}, [LINE.format(name, **one) for name, one in figures.items()]
    done.prompts = asked
    return done
