"""Lesson 15. Windows alone, batched, in chunks around W, preempted, after prefixes with tombstones: the same tokens."""

import sys
from functools import partial

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke.arguments import long_prompt, make_parser
from scripts.smoke.paths import alone, batched, cached, chunked, guesses, if_possible, preempted
from scripts.smoke.run import LeftOut, Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.trial import Trial, memory_of

from mini_engine.assembly.layout import attending
from mini_engine.assembly.loading import load
from mini_engine.base.errors import UserError
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.model.kinds import Window
from mini_engine.windows.groups import num_window_groups, places_of
from mini_engine.windows.memory import WindowMemory


class Windowed(Trial):
    """An engine whose pool holds all prompts and answers in all groups. Reports the most blocks of a window's group."""

    layout = "block-tensor, groups"

    def engine(self, **options):
        self.room = 2 * (1 + num_window_groups(places_of(attending(self.model.config.layers))))
        states = {"checkpoint_interval": self.args.block_size, "max_track_slots": 64}  # if the model has any
        return super().engine(**states, **options)

    def steps(self, engine, preempt=False):
        for result in super().steps(engine, preempt):
            held = (len(one.table) - one.table.first for one in memory_of(engine, WindowMemory).holds.values())
            self.facts["most_window_blocks"] = max([self.facts.get("most_window_blocks", 0), *held])
            yield result


def around_w(trial: Windowed, more: int) -> Outcome | LeftOut:
    """Run all prompts together, W + `more` tokens of a prompt a step."""
    window = max(kind.size for kind in trial.model.config.layers if isinstance(kind, Window))
    return chunked(trial, chunk=max(1, window + more))


def tombstones(trial: Trial) -> Outcome:
    """Run the prompts twice; in between, the tree loses its windows and keeps its own blocks."""
    engine, longest = trial.engine(), max(trial.prompts, key=len)
    trial.ask(engine)
    prefixes = cache_of(engine.scheduler.manager).prefixes
    blocks = prefixes.tree.prefix(longest)
    for block in blocks[len(blocks) // 2 :]:
        memory_of(engine, WindowMemory).kept.drop(block)
    is_shorter = 0 < prefixes.peek(longest, None, {}).num_tokens < len(blocks) * trial.args.block_size
    return trial.run(engine).exercising(is_shorter, "no hit became shorter")


PATHS = {"alone": alone, "batched": batched} | {f"chunks of {n}": partial(chunked, chunk=n) for n in (1, 7)}
PATHS |= {f"chunks of W{name}": partial(around_w, more=more) for name, more in ((" - 1", -1), ("", 0), (" + 1", 1))}
PATHS |= {"preempted": preempted, "cached prefix": cached, "tombstones": tombstones}
PATHS |= {"fast layers": partial(if_possible, backend="packed"), "speculation": guesses}


def load_windowed(path, dtype, device):
    """Load a checkpoint with windows, of any family. UserError: no layer has one."""
    model = load(path, dtype, device)
    if not any(isinstance(kind, Window) for kind in model.config.layers):
        raise UserError(f"no layer of {path} has a window; use pocket-windows, or another script")
    return model


def arguments():
    return make_parser(__doc__, block_size=8, kernel=True, load_model=load_windowed, default_model="pocket-windows")


def main(argv=None) -> int:
    return run_paths(15, Windowed, PATHS, arguments(), argv, [long_prompt(12), *COURSE_PROMPTS[1::5]])


if __name__ == "__main__":
    sys.exit(main())
