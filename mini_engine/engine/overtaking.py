"""Lesson 5. Chooses short prompts that go before longer ones, and limits how much later those finish for it.

First come, first served makes a prompt of four tokens wait until all long ones before it are done. Here it may
overtake them, but each prompt gives way only for a share of the time that it has waited, so it is never overtaken for
long. Blocks and seats stay in order: a request overtakes only those that could start now and wait for nothing but
their turn.

Time is counted in computed tokens, `Scheduler.num_scheduled`. The shortest remaining time first: Schrage, 1968.
"""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any, Protocol

from mini_engine.engine.request import Request
from mini_engine.engine.scheduler_config import SchedulerConfig

MOST = 64  # waiting requests that are looked at in a step


class Queues(Protocol):
    """What is asked of the scheduler; it says what each of these is."""

    config: SchedulerConfig
    manager: Any
    waiting: list[Request]
    running: list[Request]
    ahead: set[Request]
    num_scheduled: int

    def reserved_tokens(self, request: Request) -> int: ...


def overtakers(scheduler: Queues, spare: int) -> Iterator[tuple[Request, list[Request]]]:
    """Yield prompts that may overtake others, each with those; the one with the fewest tokens left first.

    Such a prompt fits in this step, and each one that it overtakes `gives_way_to` it. The caller puts it in
    `scheduler.ahead`, unless it has to wait for something else.

    Args:
        spare: free blocks that are promised to no request.
    """
    behind, budget = left_over(scheduler, spare)
    least, short = math.inf, []
    for place, request in enumerate(behind):
        if place and left_of(request) <= least:
            short.append((left_of(request), place))
        least = min(least, gives_way_to(request, scheduler))
    for tokens, place in sorted(short):
        if tokens > min(budget, scheduler.config.chunked_prefill_size):
            return
        passed = [other for other in behind[:place] if other not in scheduler.ahead]
        if all(tokens <= gives_way_to(other, scheduler) for other in passed):
            yield behind[place], passed
            budget -= tokens if behind[place] in scheduler.ahead else 0


def left_over(scheduler: Queues, spare: int) -> tuple[list[Request], int]:
    """Return the prompts that cannot all be finished in this step, in order, and the tokens left for them."""
    decoding = sum(left_of(request) == 1 for request in scheduler.running)
    budget, behind = scheduler.config.max_num_batched_tokens - decoding, []
    prompts = (request for request in scheduler.running if left_of(request) > 1)
    for request in chain(prompts, able_to_start(scheduler, spare)):
        tokens = min(left_of(request), scheduler.config.chunked_prefill_size)
        if request in scheduler.ahead or (not behind and tokens < budget):
            budget -= tokens
        else:
            behind.append(request)
    return behind, budget


def able_to_start(scheduler: Queues, spare: int) -> Iterator[Request]:
    """Yield waiting requests, in order, until one would find too few seats or blocks beside those before it."""
    config, beside = scheduler.config, len(scheduler.running)
    for request in scheduler.waiting[: min(MOST, config.max_num_seqs - beside)]:
        num_blocks = scheduler.manager.most_blocks(scheduler.reserved_tokens(request))
        if num_blocks + config.watermark * beside > spare:
            return
        spare -= num_blocks
        beside += 1
        yield request


def left_of(request: Request) -> int:
    """Return the number of its tokens that have no KV yet."""
    return request.num_uncomputed_tokens


def gives_way_to(request: Request, scheduler: Queues) -> float:
    """Return the most tokens that a later prompt may have left to go before a request: fewer than it, and its slack.

    For each token computed since the request arrived, later prompts may have `overtaking`; theirs do not count.
    """
    waited, overtaking = scheduler.num_scheduled - request.arrived_at, scheduler.config.overtaking
    slack = waited * overtaking / (1 + overtaking) - request.num_overtaken
    return min(left_of(request) - 1, slack)
