"""Lesson 6. Shares the engine's places between clients: one that asks for many answers does not take them all.

The scheduler's policy "priority" puts smaller numbers first. A client's first answer gets the number of its turn, and
each further answer that of a client that comes TURNS later, so that it waits, but not for ever. If all places are taken
when a turn comes, the last running answer gives up its own and will go on later. It keeps the next one until it has
caught up with itself, so being preempted never stops an answer.
"""

from collections.abc import Sequence

from mini_engine.engine.jobs import Job
from mini_engine.engine.request import Request
from mini_engine.engine.scheduler import Scheduler

TURNS = 8


def in_turn(jobs: Sequence[Job], turn: int) -> list[Job]:
    """Return one client's jobs with their priorities. turn: how many clients have come before."""
    return [job._replace(priority=turn + TURNS * index) for index, job in enumerate(jobs)]


def give_place(scheduler: Scheduler) -> int:
    """Preempt the last running request that can give way, if all places are taken and a waiting one would fit instead.

    Returns:
        the number of preempted requests, 0 or 1. With the policy "fcfs" or with `reserve_answers` always 0.
    """
    waiting, running, config = scheduler.waiting, scheduler.running, scheduler.config
    if config.policy != "priority" or config.reserve_answers or not waiting or len(running) < config.max_num_seqs:
        return 0
    new = waiting[0]
    last = next((one for one in reversed(running) if one.priority > new.priority and one.has_caught_up), None)
    if last is None or not fits_instead(scheduler, new, last):
        return 0
    scheduler.preempt(last)
    return 1


def fits_instead(scheduler: Scheduler, new: Request, last: Request) -> bool:
    """Whether the pool has room for `new` once `last` has given back its blocks and all promises are kept.

    Not yet if only KV that is on its way is missing: until it has arrived, `last` can go on.
    """
    manager, others = scheduler.manager, [one for one in scheduler.running if one is not last]
    free = manager.num_free_blocks + len(manager.tables[last.id].blocks) - sum(map(scheduler.reserved_blocks, others))
    cost = manager.cost(new.token_ids, scheduler.reserved_tokens(new), new.namespace)
    if cost.should_wait and manager.coordinator.has_room:
        return False
    return cost.num_blocks + scheduler.config.watermark * len(others) <= free
