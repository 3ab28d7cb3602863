"""Lesson 9. The engine with lesson 0's layers and with both fast backends: the tokens are the same.

A backend is left out only where it cannot run: "packed" without a C++ compiler or in float16, and both on a GPU.
Any other failure ends the script with an error.
"""

import sys
from functools import partial

from scripts import first_line
from scripts.smoke.arguments import blocks_for, make_parser, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import LeftOut, drained, run_several

from mini_engine.base.errors import UserError
from mini_engine.base.native_build import SUFFIXES, find_compiler
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.layers import native, speed_up

REFERENCE = "reference"
BACKENDS = ("torch", "packed")


def generate(model, prompts, args) -> Outcome:
    """Run all prompts through lesson 5's engine, with the model's layers."""
    blocks = 1 + sum(blocks_for(prompts, args))
    limits = SchedulerConfig(max_num_seqs=8)
    engine = Engine.for_model(model, num_blocks=blocks, block_size=args.block_size, scheduler_config=limits)
    return drained(engine, prompts, args)


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


def sped_up(backend: str, model, prompts, args) -> Outcome | LeftOut:
    """Run the same engine over one backend's layers, or return why this machine cannot."""
    return why_not(backend, model) or generate(speed_up(model, backend), prompts, args)


def arguments():
    return make_parser(first_line(__doc__), block_size=16)


def main(argv=None) -> int:
    from scripts.pocket.prompts import COURSE_PROMPTS

    parser, others = arguments(), {backend: partial(sped_up, backend) for backend in BACKENDS}
    return run_several(9, (REFERENCE, generate), others, parser, with_prompts(argv, parser, COURSE_PROMPTS[::3]))


if __name__ == "__main__":
    sys.exit(main())
