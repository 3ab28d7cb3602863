"""Course machinery. Suite `blocks`: one tensor a layer or one run a block, clearing and copying, and untouched memory.

Blocks of 16 tokens in Qwen3-0.6B's shape, bfloat16: 56 parts (K and V of 28 layers) of 32 KiB each.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from mmap import PAGESIZE
from pathlib import Path

from scripts.bench.common import Report
from scripts.bench.options import add_threads
from scripts.bench.turns import clock_of, take_turns

import torch
from torch import Tensor

PARTS, PART, BLOCKS, CHOSEN = 2 * 28, (16, 8, 128), 256, 64  # CHOSEN of the pool's BLOCKS, scattered
COPY, CLEAR, WRITE = "copy blocks out", "clear blocks", "write a token to each"
APART, TOGETHER = "a tensor a layer", "a run a block"
STATM = Path("/proc/self/statm")  # Linux's count of this process's pages


def contenders(ids: Sequence[int]) -> dict[tuple[str, str], Callable[[], object]]:
    """Return the measured calls, by task and layout. Both layouts hold the same bytes."""
    whole = torch.rand(BLOCKS, PARTS, *PART, dtype=torch.bfloat16)
    apart, together, out = [part.clone() for part in whole.unbind(1)], whole.unbind(1), whole[: len(ids)].clone()
    chosen, token = torch.tensor(ids), torch.ones(PARTS, *PART[1:], dtype=whole.dtype)

    def write(parts: Sequence[Tensor]) -> None:
        for part, row in zip(parts, token, strict=True):
            for block in ids:
                part[block, 5] = row

    return {
        (COPY, f"{APART}, 56 copies a block"): lambda: [
            out[place, at].copy_(part[block]) for at, part in enumerate(apart) for place, block in enumerate(ids)
        ],
        (COPY, f"{APART}, 56 gathers for all"): lambda: [
            out[:, at].copy_(part.index_select(0, chosen)) for at, part in enumerate(apart)
        ],
        (COPY, f"{TOGETHER}, 1 copy a block"): lambda: [out[i].copy_(whole[block]) for i, block in enumerate(ids)],
        (CLEAR, f"{APART}, 56 fills a block"): lambda: [part[block].zero_() for part in apart for block in ids],
        (CLEAR, f"{TOGETHER}, 1 fill a block"): lambda: [whole[block].zero_() for block in ids],
        (WRITE, APART): lambda: write(apart),
        (WRITE, TOGETHER): lambda: write(together),
    }


def resident() -> int:
    """Return how many bytes of this process are in memory."""
    return int(STATM.read_text(encoding="utf-8").split()[1]) * PAGESIZE


def untouched() -> list[dict]:
    """Return the memory of a pool when it is created, and when an eighth of it is written."""
    rows = []
    for name, make in (("torch.empty", torch.empty), ("torch.zeros", torch.zeros)):
        before, begun = resident(), time.perf_counter()
        pool = make(BLOCKS, PARTS, *PART, dtype=torch.bfloat16)
        seconds, created = time.perf_counter() - begun, resident() - before
        pool[: BLOCKS // 8] = 1
        sizes = {"MiB": pool.nbytes, "in memory": created, "an eighth written": resident() - before}
        rows.append({"pool by": name, "ms": 1e3 * seconds} | {key: size / 2**20 for key, size in sizes.items()})
        del pool  # its memory must not count for the next
    return rows


add_arguments = partial(add_threads, default=1)


def run(args) -> Report:
    """Measure the pool's memory first, before freed memory can be used again; then all copies in turns."""
    memory = untouched() if STATM.exists() else []
    ids = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0))[:CHOSEN].tolist()
    rounds, nbytes = args.rounds or (5 if args.quick else 50), CHOSEN * PARTS * torch.Size(PART).numel() * 2
    timings = take_turns(contenders(ids), rounds, "blocks", clock_of(args))
    rates = {name: None if WRITE in name else nbytes / timing.median / 1e9 for name, timing in timings.items()}
    rows = [{"task": n[0], "layout": n[1], **t.columns(), "GB/s": rates[n]} for n, t in timings.items()]
    return Report("blocks", rows, [f"{CHOSEN} of {BLOCKS} blocks, scattered: {nbytes / 2**20:.0f} MiB"], more=memory)
