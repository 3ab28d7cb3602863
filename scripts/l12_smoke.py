"""Lesson 12. Runs prompts cold, then with KV from host memory, disk, a restarted server or a preemption; compacts, too.

Each path reports the number of tokens it did not compute; one that saved none is reported as not exercised.
"""

import sys

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke.arguments import make_parser
from scripts.smoke.paths import if_preempted
from scripts.smoke.run import Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.tiers import HOST, disk, host, restart, restored, temporary
from scripts.smoke.trial import Trial

from lessons.l12_tiers.compact import compact, shrink
from mini_engine.assembly.loading import load
from mini_engine.kv.cache_coordinator import cache_of


class Tiers(Trial):
    """An engine whose pool just holds all prompts and answers."""

    room = 1


def cold(trial: Trial) -> Outcome:
    """Run all prompts with empty tiers behind the pool."""
    with temporary() as folder:
        engine = trial.engine(kv_cache_dir=folder, **HOST)
        return trial.outcome(engine, trial.ask(engine))


def swapped(trial: Trial) -> Outcome:
    """Run in a pool so small that requests are preempted; what they leave is evicted, so it comes back from a tier."""
    engine = trial.engine(tight=True, **HOST)
    tree, requests = cache_of(engine.scheduler.manager).prefixes.tree, trial.add(engine)
    for _ in trial.steps(engine):
        tree.evict(tree.num_evictable)  # as other requests would, sooner or later
    return if_preempted(restored(trial, engine, requests), requests)


def compacted(trial: Trial) -> Outcome:
    """Compact the pool after every step, and shrink it by half of the free blocks in mid-decode."""
    engine = trial.engine(num_blocks=2 * trial.options()["num_blocks"], **HOST)
    manager = engine.scheduler.manager
    tree = cache_of(manager).prefixes.tree
    trial.ask(engine, trial.prompts[::-1])
    tree.evict(tree.num_evictable // 2)  # the pool's first blocks: the first prompts' are the oldest
    pool = getattr(engine.runner.pool, "kv", engine.runner.pool)  # a hybrid also has one of states
    requests, num_moved = trial.add(engine), 0
    for _ in trial.steps(engine):
        if trial.summary.num_steps == trial.args.max_new_tokens // 2:
            shrink(manager, pool, manager.allocator.num_blocks - manager.allocator.num_free // 2)
        num_moved += compact(manager)
    return trial.outcome(engine, requests).exercising(num_moved, "no block was moved")


PATHS = {"cold": cold, "host": host, "disk": disk, "restart": restart, "swapped": swapped, "compacted": compacted}


def arguments():
    return make_parser(__doc__, block_size=8, load_model=load)  # dense or hybrid: `--model pocket-hybrid`


def main(argv=None) -> int:
    return run_paths(12, Tiers, PATHS, arguments(), argv, COURSE_PROMPTS[-3:])


if __name__ == "__main__":
    sys.exit(main())
