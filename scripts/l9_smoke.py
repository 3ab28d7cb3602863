"""Lesson 9. The engine with lesson 0's layers and with both fast backends: the tokens are the same.

A backend is left out only where it cannot run: "packed" without a C++ compiler or in float16, and both on a GPU.
Any other failure ends the script with an error.
"""

import sys
from functools import partial

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke.arguments import blocks_for, make_parser
from scripts.smoke.paths import batched
from scripts.smoke.run import LeftOut, Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.trial import Trial

from mini_engine.base.errors import UserError
from mini_engine.base.native_build import SUFFIXES, find_compiler
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.layers import native, speed_up

BACKENDS = ("torch", "packed")


class Layers(Trial):
    """Lesson 5's engine, around a model with one backend's layers or its own."""

    def engine(self, backend: str = "") -> Engine:
        model = speed_up(self.model, backend) if backend else self.model
        sizes = {"num_blocks": 1 + sum(blocks_for(self.prompts, self.args)), "block_size": self.args.block_size}
        return Engine.for_model(model, **sizes, scheduler_config=SchedulerConfig(max_num_seqs=8))


def why_not(backend: str, model) -> str | None:
    """Return why this machine cannot run a backend, or None if it can.

    Raises:
        UserError: there is a compiler, but it cannot build the packed layers, which is a bug.
    """
    if model.device.type != "cpu":
        return f"fast layers run on the CPU only; this model is on {model.device}"
    if backend != "packed":
        return None
    try:
        native.Functions(model.dtype)
    except UserError as why:
        if model.dtype in SUFFIXES and has_compiler():
            raise
        return str(why)
    return None


def has_compiler() -> bool:
    """Return True if a C++ compiler is installed, working or not."""
    try:
        find_compiler()
    except UserError:
        return False
    return True


def if_it_runs(needs: str, trial: Trial, **options) -> Outcome | LeftOut:
    """Run all prompts with options that need a backend, or return why this machine cannot run that one."""
    return why_not(needs, trial.model) or batched(trial, **options)


PATHS = {"reference": batched} | {backend: partial(if_it_runs, backend, backend=backend) for backend in BACKENDS}
arguments = partial(make_parser, __doc__, block_size=16)


def main(argv=None) -> int:
    return run_paths(9, Layers, PATHS, arguments(), argv, COURSE_PROMPTS[::3])


if __name__ == "__main__":
    sys.exit(main())
