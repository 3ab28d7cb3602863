"""Lesson 10. The engine, the engine with replayed decode steps, and the device loop: the tokens are the same.

No path is left out: on a CPU the padded steps run without a graph, on a GPU they are captured, and a path that cannot
run is an error.
"""

import sys
from functools import partial

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke import on_device as device_loop
from scripts.smoke.arguments import blocks_for, make_parser
from scripts.smoke.paths import batched
from scripts.smoke.run import Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.trial import Trial

from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import Capture, CudaCapture, GraphRunner, no_graph

MAX_NUM_SEQS = 8


class Steps(Trial):
    """Lesson 5's engine. replayed: its decode steps are padded to a capture size and replayed."""

    def engine(self, replayed: bool = False) -> Engine:
        engine = Engine.for_model(
            self.model,
            num_blocks=1 + sum(blocks_for(self.prompts, self.args)),
            block_size=self.args.block_size,
            kernel=kernel_for(self.args.device),
            scheduler_config=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
        )
        if not replayed:
            return engine
        plain, capture = ModelRunner(self.model, engine.runner.pool), capture_for(self.args.device)
        return Engine(engine.config, engine.scheduler, GraphRunner(plain, MAX_NUM_SEQS, capture))


def on_device(trial: Trial) -> Outcome:
    """Run without an engine: slots, tables and tokens stay on the device until all answers are complete."""
    kernel = load_kernel(kernel_for(trial.args.device), trial.args.device, trial.model.dtype)
    return device_loop.on_device(trial, trial.model.config, kernel, capture=capture_for(trial.args.device))


PATHS = {"plain": batched, "replayed": partial(batched, replayed=True), "on device": on_device}


def kernel_for(device: str) -> str:
    """Return the kernel that can be captured on a GPU, and the fastest that works elsewhere."""
    return "triton" if device == "cuda" else "auto"


def capture_for(device: str) -> Capture:
    """Return the capture for a device: CUDA graphs on a GPU, no recording elsewhere."""
    return CudaCapture() if device == "cuda" else no_graph


arguments = partial(make_parser, __doc__, block_size=16)


def main(argv=None) -> int:
    return run_paths(10, Steps, PATHS, arguments(), argv, COURSE_PROMPTS[::3])


if __name__ == "__main__":
    sys.exit(main())
