"""Course machinery. Suite `allocator`: allocate and free 64 blocks, all checks included, in pools of several sizes.

The second table has no times: how much a full pool can still place if a request's blocks may lie anywhere, and if they
must be one run.
"""

import random
import re
from collections.abc import Callable
from heapq import heappop, heappush

from scripts.bench.common import Report
from scripts.bench.turns import take_turns

from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.refcount import RefCountedAllocator

BLOCKS = 64
CALLS = 200  # per measurement, so that the cost of reading the clock is negligible
POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000)
PLACED_IN, LARGEST, PLACED = 1_024, 64, 20_000  # blocks in a pool, of the largest request, and requests placed
Place = Callable[[bytearray, int], list[int]]


def worn_allocator(make, num_blocks: int):
    """Return an allocator as it looks in use: half of the pool held, the free list shuffled."""
    allocator = make(num_blocks)
    blocks = allocator.alloc_blocks(allocator.num_free)
    random.Random(0).shuffle(blocks)
    allocator.free(blocks[: len(blocks) // 2])
    return allocator


def take_and_return(allocator):
    """Return a contender that allocates and frees 64 blocks, CALLS times."""

    def run() -> None:
        for _ in range(CALLS):
            allocator.free(allocator.alloc_blocks(BLOCKS))

    return run


def bare_list(num_blocks: int):
    """Return the lower bound: a list without any checks."""
    free = list(range(num_blocks))

    def run() -> None:
        for _ in range(CALLS):
            blocks = free[-BLOCKS:]
            del free[-BLOCKS:]
            free.extend(blocks)

    return run


def bare_heap(num_blocks: int):
    """Return a free list that hands out the lowest blocks first, without any checks."""
    free = list(range(num_blocks))

    def run() -> None:
        for _ in range(CALLS):
            for block in [heappop(free) for _ in range(BLOCKS)]:
                heappush(free, block)

    return run


# ---------------------------------------------------------------- where requests are placed


def anywhere(pool: bytearray, size: int) -> list[int]:
    """Return the lowest free blocks, or as many as there are."""
    return [block for block, held in enumerate(pool) if not held][:size]


def first_fit(pool: bytearray, size: int) -> list[int]:
    """Return the beginning of the first free run that is long enough; nothing if there is none."""
    at = pool.find(bytes(size))
    return list(range(at, at + size)) if at >= 0 else []


def best_fit(pool: bytearray, size: int) -> list[int]:
    """Return the beginning of the shortest free run that is long enough; nothing if there is none."""
    runs = [run.span() for run in re.finditer(rb"\0+", pool) if run.end() - run.start() >= size]
    at = min(runs, key=lambda run: run[1] - run[0])[0] if runs else None
    return [] if at is None else list(range(at, at + size))


def placed(name: str, place: Place, num_requests: int) -> dict:
    """Place requests of 1 to LARGEST blocks. One that finds no room waits until random others have ended.

    Returns a row: the share of the pool that is held whenever a request finds no room, and how often it found none
    although enough blocks were free.
    """
    chance, pool, running = random.Random(0), bytearray(PLACED_IN), []
    held_then, in_vain = [], 0
    for _ in range(num_requests):
        size = chance.randint(1, LARGEST)
        while len(blocks := place(pool, size)) < size:
            held_then.append(sum(pool) / PLACED_IN)
            in_vain += pool.count(0) >= size
            ended = running.pop(chance.randrange(len(running)))
            for block in ended:
                pool[block] = 0
        for block in blocks:
            pool[block] = 1
        running.append(blocks)
    return {
        "a request's blocks": name,
        "held when one finds no room, %": 100 * sum(held_then) / len(held_then),
        "of these, enough were free, %": 100 * in_vain / len(held_then),
    }


def placements(num_requests: int) -> list[dict]:
    """Return the table of where requests are placed. It is the same on every machine."""
    ways: dict[str, Place] = {"anywhere": anywhere, "one run, first fit": first_fit, "one run, best fit": best_fit}
    return [placed(name, place, num_requests) for name, place in ways.items()]


# ---------------------------------------------------------------- the report


def run(args) -> Report:
    """Measure microseconds for allocating and freeing 64 blocks, for each allocator and pool size."""
    makers = {"lesson 2": BlockAllocator, "lesson 8, counted": RefCountedAllocator}
    sizes = POOL_SIZES[:3] if args.quick else POOL_SIZES
    contenders = {("a list, no checks", size): bare_list(size) for size in sizes}
    contenders |= {("lowest first, no checks", size): bare_heap(size) for size in sizes}
    for name, make in makers.items():
        contenders |= {(name, size): take_and_return(worn_allocator(make, size)) for size in sizes}
    timings = take_turns(contenders, args.rounds or (30 if args.quick else 200), "allocator")
    rows = [
        {"allocator": name, "blocks in the pool": size} | timing.columns("µs", CALLS)
        for (name, size), timing in timings.items()
    ]
    note = f"second table: requests of 1 to {LARGEST} blocks come and go in a pool of {PLACED_IN:,}"
    return Report("allocator", rows, [note], more=placements(PLACED // 10 if args.quick else PLACED))
