"""Course machinery. Suite `allocator`: allocate and free 64 blocks, all checks included, in pools of several sizes."""

import random

from scripts.bench.common import Report, Timing, take_turns

BLOCKS = 64
CALLS = 200  # per measurement, so that the cost of reading the clock is negligible
POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000)


def add_arguments(parser) -> None:
    """Add this suite's options: none."""


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


def run(args) -> Report:
    """Measure microseconds for allocating and freeing 64 blocks, for each allocator and pool size."""
    from mini_engine.kv.allocator import BlockAllocator
    from mini_engine.kv.refcount import RefCountedAllocator

    makers = {"lesson 2": BlockAllocator, "lesson 8, counted": RefCountedAllocator}
    sizes = POOL_SIZES[:3] if args.quick else POOL_SIZES
    contenders = {("a list, no checks", size): bare_list(size) for size in sizes}
    for name, make in makers.items():
        contenders |= {(name, size): take_and_return(worn_allocator(make, size)) for size in sizes}
    fresh = {size: take_and_return(BlockAllocator(size)) for size in sizes}
    contenders |= {("lesson 2, in an unused pool", size): run for size, run in fresh.items()}
    timings = take_turns(contenders, args.rounds or (30 if args.quick else 200), "allocator")
    return Report("allocator", [row(name, size, timing) for (name, size), timing in timings.items()], drawn="µs")


def row(name: str, pool_size: int, timing: Timing) -> dict:
    return {
        "allocator": name,
        "blocks in the pool": pool_size,
        "µs": timing.median / CALLS * 1e6,
        "best": timing.best / CALLS * 1e6,
        "± %": timing.spread * 100,
    }
