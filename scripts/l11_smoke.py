"""Lesson 11. A hybrid alone, batched, in chunks, preempted, after a cached prefix, on the device: the same tokens."""

import sys
from functools import partial

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke import on_device as device_loop
from scripts.smoke.arguments import make_parser
from scripts.smoke.paths import alone, batched, cached, chunked, preempted
from scripts.smoke.run import Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.trial import Trial, memory_of

from lessons.l11_hybrid.row_states import RowStates
from mini_engine.assembly.layout import kv_shape
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine
from mini_engine.families.qwen3_5 import FAMILY
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.memory import StateMemory
from mini_engine.hybrid.store import HybridKv


class Hybrid(Trial):
    """An engine with states, and a checkpoint of them every few blocks."""

    layout = "block-tensor, states"

    def engine(self, **options) -> Engine:
        tracked = {"max_track_slots": 4 * len(self.prompts) + 4, "checkpoint_interval": 8 * self.args.block_size}
        return super().engine(**tracked, **options)

    def outcome(self, engine, requests) -> Outcome:
        """Add lost slots of states and of checkpoints to the faults."""
        done, pool = super().outcome(engine, requests), engine.runner.pool
        memory = memory_of(engine, StateMemory)
        assert isinstance(pool, HybridKv)
        done.kv["state_bytes"] = pool.states.mem_bytes
        states, held = memory.states, memory.states.max_reqs - len(memory.free_slots)
        num_slots = len(memory.checkpoints.slots) + len(states.free_track_slots)
        done.requiring(held == 0, f"{held} state slots are still held")
        return done.requiring(num_slots == states.max_track_slots, "a checkpoint slot belongs to no node")


def on_device(trial: Trial) -> Outcome:
    """Run without an engine, in lesson 10's loop: slots, tables, states and tokens stay on the device."""
    config, dtype, device = trial.model.config, trial.model.dtype, trial.args.device
    states = GdnPool.for_model(config, len(trial.prompts), dtype=dtype, device=device)
    parts = lambda blocks: HybridKv(blocks, states), RowStates(states)
    return device_loop.on_device(trial, kv_shape(config), load_kernel("auto", device, dtype), *parts)


PATHS = {
    "alone": alone,
    "batched": batched,
    **{f"chunks of {size}": partial(chunked, chunk=size) for size in (1, 7, 33, 64)},
    "preempted": preempted,
    "cached prefix": cached,
    "on device": on_device,
}

arguments = partial(make_parser, __doc__, block_size=8, load_model=FAMILY.load, default_model="pocket-hybrid")


def main(argv=None) -> int:
    return run_paths(11, Hybrid, PATHS, arguments(), argv, COURSE_PROMPTS[::4])


if __name__ == "__main__":
    sys.exit(main())
