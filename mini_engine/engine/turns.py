"""Lesson 6. Shares the engine's running slots fairly: a client that asks for many answers does not take them all.

The scheduler's policy "priority" puts smaller numbers first. A client's first answer gets the number of its turn, and
each further answer the number of a client that comes TURNS later, so it waits, but not forever. If all slots are taken
when a turn comes, the last running answer is preempted and resumes later. It cannot be preempted again until it has
caught up with where it was, so every answer makes progress.
"""

from collections.abc import Sequence

from mini_engine.engine.jobs import Job
from mini_engine.engine.request import Request
from mini_engine.engine.scheduler import Scheduler

TURNS = 8


def in_turn(jobs: Sequence[Job], turn: int) -> list[Job]:
    """Return one client's jobs with their priorities. turn: the number of clients before this one."""
    return [job._replace(priority=turn + TURNS * index) for index, job in enumerate(jobs)]


def give_place(scheduler: Scheduler) -> int:
    """Preempt the last running request that can be, if all slots are taken and a waiting one would fit instead.

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
    """Return True if the pool has room for `new` once `last` has freed its blocks, all reservations included.

    False if `new` only waits for KV in flight: `last` can go on until it has arrived.
    """
    manager, others = scheduler.manager, [one for one in scheduler.running if one is not last]
    free = manager.num_free_blocks + len(manager.tables[last.id].blocks) - sum(map(scheduler.reserved_blocks, others))
    cost = manager.cost(new.token_ids, scheduler.reserved_tokens(new), new.namespace)
    if cost.should_wait and manager.coordinator.has_room:
        return False
    return cost.num_blocks + scheduler.config.watermark * len(others) <= free
