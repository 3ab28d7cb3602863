"""Lesson 17. K and V in 8 and in 4 bits in every way that an engine runs: the same tokens each time, and KL.

Full precision is compared with Hugging Face. With fewer bits, a path must give each prompt's tokens when run alone by
the reference kernel with as few bits: rounding does not depend on the batch, the chunks or where blocks come from.
"""

import functools
import sys

from scripts import first_line
from scripts.smoke.arguments import blocks_for, make_parser, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import LeftOut, answers, lost_blocks, run_several

from mini_engine.assembly.build import build_engine
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.tiers.connector import TierConnector

ALONE = "float32"
DTYPES = ("int8", "int4")
CHUNK = 7
LARGE = 2**28  # bytes of a tier
LONG = "Once upon a time there was a brave bear named Bruno. " * 12 + "The capital of France is"


def alone(model, prompts, args) -> Outcome:
    """Run the prompts one after another in full precision, and judge the effect of fewer bits on predictions."""
    from scripts.bench.kv_quality import compare  # it imports torch, after scripts.smoke has set OpenMP up

    engine = make_engine(model, prompts, args, enable_prefix_caching=False)
    done = outcome(engine, one_by_one(engine, prompts, args))
    texts = [ids + answer for ids, answer in zip(prompts, done.outputs, strict=True)]
    done.kv["KL"] = {name: f"{found.kl:.1e}" for name, found in compare(model, texts).items() if name != "full"}
    return done


def one_by_one(engine: Engine, prompts, args) -> list[list[int]]:
    """Return each prompt's answer, alone in the engine."""
    return [answers(engine, [ids], args)[0] for ids in prompts]


def judged(way, kv_dtype, model, prompts, args) -> Outcome | LeftOut:
    """Run a path in fewer bits. Expected: each prompt alone by the reference kernel."""
    plain = {"kernel": "reference", "enable_prefix_caching": False}
    expected = one_by_one(make_engine(model, prompts, args, kv_dtype=kv_dtype, **plain), prompts, args)
    try:
        done = way(model, prompts, args, kv_dtype=kv_dtype)
    except UserError as why:
        return str(why)
    done.expected = expected
    return done


def lonely(model, prompts, args, **options) -> Outcome:
    """Run the prompts one after another, without prefix caching."""
    engine = make_engine(model, prompts, args, enable_prefix_caching=False, **options)
    return outcome(engine, one_by_one(engine, prompts, args))


def batched(model, prompts, args, **options) -> Outcome:
    """Run all prompts together."""
    engine = make_engine(model, prompts, args, **options)
    return outcome(engine, answers(engine, prompts, args))


def preempted(model, prompts, args, **options) -> Outcome:
    """Run in a pool that is too small for all answers, and take back the newest request's blocks every few steps."""
    engine = make_engine(model, prompts, args, CHUNK, num_blocks=2 + max(blocks_for(prompts, args)), **options)
    outputs = answers(engine, prompts, args, preempt=True)
    return outcome(engine, outputs).exercising(engine.scheduler.num_preemptions, "no request was preempted")


def cached(model, prompts, args, **options) -> Outcome:
    """Run the prompts twice: the second time every whole block of a prompt is there."""
    engine = make_engine(model, prompts, args, **options)
    answers(engine, prompts, args)
    found = cache_of(engine.scheduler.manager).prefixes.stats
    before = found.found_tokens
    outputs = answers(engine, prompts, args, name="again")
    return outcome(engine, outputs).exercising(found.found_tokens > before, "no prompt found a prefix")


def from_host(model, prompts, args, **options) -> Outcome:
    """Run all prompts, drop the pool's cache, and run them again."""
    engine = make_engine(model, prompts, args, kv_host_bytes=LARGE, kv_always=True, **options)
    answers(engine, prompts, args)
    engine.scheduler.manager.coordinator.clear()
    done = outcome(engine, answers(engine, prompts, args, name="again"))
    connector = cache_of(engine.scheduler.manager).connector
    assert isinstance(connector, TierConnector)
    done.kv["restored_tokens"] = connector.block_store.restored_tokens
    return done.exercising(done.kv["restored_tokens"], "no token came back from a tier")


WAYS = {
    "alone": lonely,
    "batched": batched,
    "chunked": functools.partial(batched, chunk=CHUNK),
    "preempted": preempted,
    "cached": cached,
    "host": from_host,
}
MORE_WAYS = {
    "fast layers": functools.partial(batched, backend="auto"),
    "speculation": functools.partial(batched, speculate=4),
    **{f"kernel {name}": functools.partial(batched, kernel=name) for name in ("torch", "cpu")},
}


def paths(ways) -> dict:
    """Return each way with each number of bits, by name."""
    return {f"{dtype} {name}": functools.partial(judged, way, dtype) for dtype in DTYPES for name, way in ways.items()}


def make_engine(model, prompts, args, chunk=512, **options) -> Engine:
    """Return an engine with these options, and a pool that holds all prompts and answers twice."""
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, chunked_prefill_size=chunk)
    usual = {"num_blocks": 1 + 2 * sum(blocks_for(prompts, args)), "backend": "reference", "kernel": args.kernel}
    return build_engine(model, **usual | {"block_size": args.block_size, "scheduler_config": limits} | options)


def outcome(engine: Engine, outputs) -> Outcome:
    """Return the answers, the memory, and any faults: lost blocks."""
    return Outcome(outputs, {"layout": "block-tensor", "bytes": engine.runner.pool.bytes}, lost_blocks(engine))


def arguments():
    parser = make_parser(first_line(__doc__), block_size=8, kernel=True)
    parser.add_argument("--all", action="store_true", help="also run fast layers, speculation and every kernel")
    return parser


def main(argv=None) -> int:
    from scripts.pocket.prompts import COURSE_PROMPTS

    parser = arguments()
    argv = with_prompts(argv, parser, [LONG, *COURSE_PROMPTS[1::5]])
    ways = WAYS | MORE_WAYS if parser.parse_args(argv).all else WAYS
    return run_several(17, (ALONE, alone), paths(ways), parser, argv)


if __name__ == "__main__":
    sys.exit(main())
