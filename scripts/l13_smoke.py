"""Lesson 13. One model over several processes, and several engines behind a router: the same tokens.

Every path is compared with Hugging Face. A path that did not do what it is named for is reported as not exercised.
"""

import sys
from contextlib import ExitStack, contextmanager

from scripts import first_line
from scripts.smoke.arguments import blocks_for, make_parser, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import LeftOut, drained, run_several

from mini_engine.build import over_ranks, start_ranks
from mini_engine.cli.parser import whole_number
from mini_engine.distributed.ranks.processes import Ranks
from mini_engine.distributed.routing.policy import PrefixScore
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import SchedulerConfig
from mini_engine.engine_config import EngineConfig
from mini_engine.kv.prefix_cache import PrefixCache, caching_manager

ALONE = "alone"
CHUNK = 7


class Paths:
    """What the paths share: the ranks, started by the first path and ended with the script."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.ranks: Ranks | None = None

    def engine(self, model, prompts, args, **limits) -> Engine:
        """Return an engine over all ranks, with empty pools that hold all prompts."""
        if self.ranks is None:
            config = EngineConfig(tensor_parallel_size=args.tp)
            self.ranks = self.stack.enter_context(start_ranks(args.model, config, model.dtype)[0])
        return over_ranks(self.ranks, EngineConfig(**options_for(prompts, args, **limits)))

    def alone(self, model, prompts, args) -> Outcome:
        """Run the prompts one after another over all ranks."""
        engine = self.engine(model, prompts, args)
        each = [drained(engine, [ids], args) for ids in prompts]
        kv = {"layout": f"block-tensor over {args.tp} ranks", "bytes": args.tp * engine.runner.pool.bytes}
        return Outcome([one.outputs[0] for one in each], kv, [fault for one in each for fault in one.faults])

    def batched(self, model, prompts, args) -> Outcome:
        """Run all prompts together."""
        return drained(self.engine(model, prompts, args), prompts, args)

    def chunked(self, model, prompts, args) -> Outcome | LeftOut:
        """Run all prompts together, a few tokens of a prompt a step."""
        if all(len(ids) <= CHUNK for ids in prompts):
            return "no prompt is longer"
        return drained(self.engine(model, prompts, args, chunked_prefill_size=CHUNK), prompts, args)

    def preempted(self, model, prompts, args) -> Outcome:
        """Take back the blocks of the newest request once, in mid-decode."""
        engine = self.engine(model, prompts, args)
        params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
        requests = [engine.add_request(str(i), ids, params) for i, ids in enumerate(prompts)]
        for _ in range(2):
            engine.step()
        if engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        while engine.has_unfinished:
            engine.step()
        outcome = Outcome([request.output_ids for request in requests], {})
        return outcome.exercising(engine.scheduler.num_preemptions, "no request was preempted")

    def cached(self, model, prompts, args) -> Outcome:
        """Run the prompts twice: the second time every whole block of a prompt is there."""
        engine = self.engine(model, prompts, args)
        drained(engine, prompts, args)
        before = found_tokens(engine)
        outcome = drained(engine, prompts, args)
        return outcome.exercising(found_tokens(engine) > before, "no prompt found a prefix")


def routed(model, prompts, args) -> Outcome:
    """Send the prompts twice to replicas that the policy chooses; the second time each goes where it is known."""
    options = options_for(prompts, args)
    engines = {i: Engine.for_model(model, manager=caching_manager, **options) for i in range(args.replicas)}
    policy, places, outputs, faults = PrefixScore(), [], [], []
    for ids in 2 * prompts:
        keys = [tuple(ids[:end]) for end in range(args.block_size, len(ids) + 1, args.block_size)]
        place = policy.choose(keys, {i: sum(p == i for p in places) for i in engines})
        policy.sent(place, keys)
        places.append(place)
        one = drained(engines[place], [ids], args)
        outputs, faults = outputs + one.outputs, faults + one.faults
    half = len(prompts)
    faults += [] if outputs[:half] == outputs[half:] else ["the second answers differ from the first"]
    outcome = Outcome(outputs[half:], {}, faults)
    outcome.exercising(sum(map(found_tokens, engines.values())), "no replica found a prefix")
    return outcome.exercising(len(set(places)) > 1, "one replica answered everything")


def found_tokens(engine: Engine) -> int:
    """Return how many prompt tokens the engine's tree has had."""
    manager = engine.scheduler.manager
    assert isinstance(manager.prefixes, PrefixCache)  # no engine here has another
    return manager.prefixes.stats.found_tokens


def options_for(prompts, args, **limits) -> dict:
    """Return an engine's options for a pool that holds all prompts and answers, and the null block."""
    blocks = blocks_for(prompts, args)
    config = SchedulerConfig(**limits)
    return {"num_blocks": 1 + 2 * sum(blocks), "block_size": args.block_size, "scheduler_config": config}


@contextmanager
def paths():
    """Yield the first path and the others by name."""
    with ExitStack() as stack:
        shared = Paths(stack)
        names = ("batched", "chunked", "preempted", "cached")
        yield (ALONE, shared.alone), {name: getattr(shared, name) for name in names} | {"routed": routed}


def arguments():
    parser = make_parser(first_line(__doc__), block_size=8)
    parser.add_argument(
        "--tp", type=whole_number(1), default=2, metavar="N", help="processes of one model (default: 2)"
    )
    parser.add_argument(
        "--replicas", type=whole_number(1), default=2, metavar="N", help="engines behind the router (default: 2)"
    )
    return parser


def main(argv=None) -> int:
    from mini_engine.pocket import COURSE_PROMPTS

    parser = arguments()
    with paths() as (first, others):
        return run_several(13, first, others, parser, with_prompts(argv, parser, COURSE_PROMPTS[-3:]))


if __name__ == "__main__":
    sys.exit(main())
