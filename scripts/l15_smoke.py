"""Lesson 15. Windows alone, batched, in chunks around W, preempted, after prefixes with tombstones: the same tokens.

Every path is compared with Hugging Face. A path that did not do what it is named for is reported as not exercised.
"""

import functools
import sys

from scripts import first_line
from scripts.smoke.arguments import blocks_for, make_parser, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import LeftOut, add_all, answers, lost_blocks, run_several
from scripts.smoke.steps import steps_of

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.layout import attending
from mini_engine.assembly.loading import load
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.kv.memories import Memories
from mini_engine.model.kinds import Window
from mini_engine.windows.groups import num_window_groups, places_of
from mini_engine.windows.memory import WindowMemory

ALONE = "alone"
MAX_NUM_SEQS = 4
LONG = "Once upon a time there was a brave bear named Bruno. " * 12 + "The capital of France is"


def alone(model, prompts, args) -> Outcome:
    """Run the prompts one after another, and note the most blocks that a window group held."""
    engine = make_engine(model, prompts, args, enable_prefix_caching=False)
    outputs, most = [], 0
    for index, ids in enumerate(prompts):
        [request] = add_all(engine, [ids], args, name=str(index))
        for _ in steps_of(engine):
            most = max([most, *(len(hold.table) - hold.table.first for hold in memory_of(engine).holds.values())])
        outputs.append(request.output_ids)
    done = outcome(engine, outputs)
    done.kv["most_window_blocks"] = most
    return done


def batched(model, prompts, args) -> Outcome:
    """Run all prompts together."""
    engine = make_engine(model, prompts, args)
    return outcome(engine, answers(engine, prompts, args))


def chunked(size_of, model, prompts, args) -> Outcome | LeftOut:
    """Run all prompts together, `size_of(W)` tokens of a prompt a step."""
    size = max(1, size_of(window_of(model)))
    if all(len(ids) <= size for ids in prompts):
        return "no prompt is longer"
    engine = make_engine(model, prompts, args, size)
    return outcome(engine, answers(engine, prompts, args))


def preempted(model, prompts, args) -> Outcome:
    """Take back the blocks of the newest request every few steps."""
    engine = make_engine(model, prompts, args, 7)
    outputs = answers(engine, prompts, args, preempt=True)
    return outcome(engine, outputs).exercising(engine.scheduler.num_preemptions, "no request was preempted")


def cached(model, prompts, args) -> Outcome:
    """Run the prompts twice: the second time every prompt longer than a block begins after its last window."""
    engine = make_engine(model, prompts, args)
    answers(engine, prompts, args)
    stats = cache_of(engine.scheduler.manager).prefixes.stats
    before = stats.found_tokens
    outputs = answers(engine, prompts, args, name="again")
    return outcome(engine, outputs).exercising(stats.found_tokens > before, "no prompt found its window")


def tombstones(model, prompts, args) -> Outcome:
    """Run the prompts twice; in between, the tree loses its windows and keeps its own blocks."""
    engine = make_engine(model, prompts, args)
    answers(engine, prompts, args)
    manager, longest = engine.scheduler.manager, max(prompts, key=len)
    blocks = cache_of(manager).prefixes.tree.prefix(longest)
    for block in blocks[len(blocks) // 2 :]:
        memory_of(engine).kept.drop(block)
    found = cache_of(manager).prefixes.peek(longest, None, {}).num_tokens
    outputs = answers(engine, prompts, args, name="again")
    is_shorter = 0 < found < len(blocks) * args.block_size
    return outcome(engine, outputs).exercising(is_shorter, "no hit became shorter")


def fast(model, prompts, args) -> Outcome | LeftOut:
    """Run lesson 9's layers."""
    try:
        engine = make_engine(model, prompts, args, backend="packed")
    except UserError as why:
        return str(why)
    return outcome(engine, answers(engine, prompts, args))


def speculating(model, prompts, args) -> Outcome:
    """Run the prompts twice with guesses, some of which are taken back."""
    engine = make_engine(model, prompts, args, speculate=4)
    answers(engine, prompts, args)
    return outcome(engine, answers(engine, prompts, args, name="again"))


PATHS = {
    "batched": batched,
    "chunks of 1": functools.partial(chunked, lambda window: 1),
    "chunks of 7": functools.partial(chunked, lambda window: 7),
    "chunks of W - 1": functools.partial(chunked, lambda window: window - 1),
    "chunks of W": functools.partial(chunked, lambda window: window),
    "chunks of W + 1": functools.partial(chunked, lambda window: window + 1),
    "preempted": preempted,
    "cached prefix": cached,
    "tombstones": tombstones,
    "fast layers": fast,
    "speculation": speculating,
}


def make_engine(model, prompts, args, chunk=512, backend="reference", **options) -> Engine:
    """Return an engine whose pool holds all prompts and answers in all groups."""
    limits = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512, chunked_prefill_size=chunk)
    num_groups = 1 + num_window_groups(places_of(attending(model.config.layers)))
    return build_engine(
        model,
        backend=backend,
        num_blocks=1 + 2 * num_groups * sum(blocks_for(prompts, args)),
        block_size=args.block_size,
        kernel=args.kernel,
        scheduler_config=limits,
        checkpoint_interval=args.block_size,  # of states, if the model has any
        max_track_slots=64,
        **options,
    )


def memory_of(engine: Engine) -> WindowMemory:
    """Return the memory of windows, perhaps one of several."""
    memory = cache_of(engine.scheduler.manager).memory
    memories = memory.memories if isinstance(memory, Memories) else [memory]
    return next(one for one in memories if isinstance(one, WindowMemory))


def window_of(model) -> int:
    """Return W; 0 if no layer has a window."""
    return max((kind.size for kind in model.config.layers if isinstance(kind, Window)), default=0)


def load_windowed(path, dtype, device):
    """Load a checkpoint with windows, of any family. UserError: no layer has one."""
    model = load(path, dtype, device)
    if not window_of(model):
        raise UserError(f"no layer of {path} has a window; use pocket-windows, or another script")
    return model


def outcome(engine: Engine, outputs) -> Outcome:
    """Return the answers, the memory, and any faults: lost blocks."""
    kv = {"layout": "block-tensor, groups", "bytes": engine.runner.pool.bytes}
    return Outcome(outputs, kv, lost_blocks(engine))


def arguments():
    parser = make_parser(first_line(__doc__), block_size=8, kernel=True)
    parser.set_defaults(load_model=load_windowed, default_model="pocket-windows")
    return parser


def main(argv=None) -> int:
    from scripts.pocket.prompts import COURSE_PROMPTS

    parser = arguments()
    return run_several(15, (ALONE, alone), PATHS, parser, with_prompts(argv, parser, [LONG, *COURSE_PROMPTS[1::5]]))


if __name__ == "__main__":
    sys.exit(main())
