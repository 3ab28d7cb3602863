"""Lesson 15. Windows alone, batched, in chunks around W, preempted, after prefixes with tombstones: the same tokens.

Every path is compared with Hugging Face. A path that did not do what it is named for is reported as not exercised.
"""

import sys
from functools import partial

from scripts.smoke.arguments import long_prompt, make_parser
from scripts.smoke.paths import batched, cached, chunked, guesses, if_possible, preempted
from scripts.smoke.run import LeftOut, Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.trial import Trial

from mini_engine.assembly.layout import attending
from mini_engine.assembly.loading import load
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.kv.memories import Memories
from mini_engine.model.kinds import Window
from mini_engine.pocket import COURSE_PROMPTS
from mini_engine.windows.groups import num_window_groups, places_of
from mini_engine.windows.memory import WindowMemory


class Windowed(Trial):
    """An engine whose pool holds all prompts and answers in all groups."""

    layout = "block-tensor, groups"

    @property
    def room(self) -> int:
        return 2 * (1 + num_window_groups(places_of(attending(self.model.config.layers))))

    def engine(self, **options) -> Engine:
        states = {"checkpoint_interval": self.args.block_size, "max_track_slots": 64}  # if the model has any
        return super().engine(**states, **options)


def alone(trial: Trial) -> Outcome:
    """Run the prompts one after another, and note the most blocks that a window group held."""
    engine, requests, most = trial.engine(enable_prefix_caching=False), [], 0
    for ids in trial.prompts:
        requests += trial.add(engine, [ids])
        for _ in trial.steps(engine):
            most = max([most, *(len(hold.table) - hold.table.first for hold in memory_of(engine).holds.values())])
    done = trial.outcome(engine, requests)
    done.kv["most_window_blocks"] = most
    return done


def around_w(trial: Trial, more: int) -> Outcome | LeftOut:
    """Run all prompts together, W + `more` tokens of a prompt a step."""
    return chunked(trial, chunk=max(1, window_of(trial.model) + more))


def tombstones(trial: Trial) -> Outcome:
    """Run the prompts twice; in between, the tree loses its windows and keeps its own blocks."""
    engine, longest = trial.engine(), max(trial.prompts, key=len)
    trial.ask(engine)
    prefixes = cache_of(engine.scheduler.manager).prefixes
    blocks = prefixes.tree.prefix(longest)
    for block in blocks[len(blocks) // 2 :]:
        memory_of(engine).kept.drop(block)
    found = prefixes.peek(longest, None, {}).num_tokens
    is_shorter = 0 < found < len(blocks) * trial.args.block_size
    return trial.outcome(engine, trial.ask(engine)).exercising(is_shorter, "no hit became shorter")


PATHS = {"alone": alone, "batched": batched}
PATHS |= {f"chunks of {size}": partial(chunked, chunk=size) for size in (1, 7)}
PATHS |= {f"chunks of {size}": partial(around_w, more=more) for size, more in (("W - 1", -1), ("W", 0), ("W + 1", 1))}
PATHS |= {"preempted": preempted, "cached prefix": cached, "tombstones": tombstones}
PATHS |= {"fast layers": partial(if_possible, backend="packed"), "speculation": guesses}


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


def arguments():
    family = {"load_model": load_windowed, "default_model": "pocket-windows"}
    return make_parser(__doc__, block_size=8, kernel=True, **family)


def main(argv=None) -> int:
    return run_paths(15, Windowed, PATHS, arguments(), argv, [long_prompt(12), *COURSE_PROMPTS[1::5]])


if __name__ == "__main__":
    sys.exit(main())
