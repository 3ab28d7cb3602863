"""Course machinery. Suite `block_size`: a decode's attention and the slots left empty, with blocks of several sizes."""

import random
from collections.abc import Callable

from scripts.bench.common import Report, left_out
from scripts.bench.kernel import make_batch, our_kernel
from scripts.bench.options import add_threads
from scripts.bench.turns import take_turns

import torch
from torch import Tensor

from mini_engine.base.errors import UserError
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable, waste_ratio

SIZES = (8, 16, 32, 64, 128)
KERNELS = ("blockwise", "torch", "cpu")
NUM_SEQS, KV_LEN = 8, 2048
NUM_REQUESTS, LONGEST = 1000, 1000  # for the slots left empty: as many requests, of 1 to as many tokens


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_threads(parser)


def contenders(sizes: tuple[int, ...]) -> dict[tuple[int, str], Callable[[], Tensor]]:
    """Bind each kernel that works here to the same sequences in blocks of each size; name the others on stderr."""
    ready = {}
    for size in sizes:
        batch = make_batch(NUM_SEQS, KV_LEN, block_size=size)
        for name in KERNELS:
            try:
                ready[size, name] = our_kernel(name, batch)
            except UserError as why:
                left_out(name, why)
    return ready


def wasted(size: int) -> float:
    """Return the share of slots that stay empty when requests of random lengths have blocks of this size."""
    chance = random.Random(0)
    lengths = [chance.randint(1, LONGEST) for _ in range(NUM_REQUESTS)]
    allocator = BlockAllocator(1 + sum(-(-length // size) for length in lengths), size)
    tables = [BlockTable(allocator) for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        table.append(length)
    return waste_ratio(tables)


def run(args) -> Report:
    """Measure all sizes in turns."""
    sizes = SIZES[:3] if args.quick else SIZES
    with torch.inference_mode():
        timings = take_turns(contenders(sizes), args.rounds or (5 if args.quick else 25), "blocks")
    rows = [
        {"block size": size}
        | {f"{name} ms": timings[size, name].median * 1e3 for name in KERNELS if (size, name) in timings}
        | {"slots empty %": 100 * wasted(size)}
        for size in sizes
    ]
    notes = [
        f"decode: one layer with Qwen3-0.6B's heads, {NUM_SEQS} sequences of {KV_LEN} keys, bfloat16",
        f"slots left empty by {NUM_REQUESTS} requests of 1 to {LONGEST} tokens",
    ]
    return Report("block_size", rows, notes)
