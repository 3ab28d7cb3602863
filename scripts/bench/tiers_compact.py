"""Course machinery. For suite `tiers`: a pool full of holes, and the effect of moving its blocks together."""

import dataclasses
import random
import time
from argparse import Namespace
from pathlib import Path

from scripts.bench.tiers_engine import BLOCK, Row, row, row_of
from scripts.bench.turns import take_turns

import torch

from lessons.l12_tiers.compact import compact
from mini_engine.attention.registry import load_kernel
from mini_engine.checkpoint.config import DTYPES, Qwen3Config
from mini_engine.engine.request import Request
from mini_engine.engine.runner import plan_step
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.manager import KvCacheManager

SCATTERED, WISH = 2048, 64  # blocks in a pool full of holes, and of a request to place there


def compact_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the time of one layer's attention over scattered blocks, and over the same blocks moved together."""
    config, dtype = Qwen3Config.from_dir(args.checkpoint), DTYPES[args.dtype]
    config, attend = dataclasses.replace(config, num_hidden_layers=1), load_kernel("auto", "cpu", dtype)
    contenders, moved = {}, 0
    for name in ("scattered", "together"):
        pool = KvPool(config, SCATTERED, BLOCK, attend, dtype, "cpu")
        for layer in (pool.K[0], pool.V[0]):
            layer.normal_()  # so that every block has its own memory
        manager = caching_manager(SCATTERED, BLOCK, pool.copy_blocks)
        names = fill_with_holes(manager)
        free = sorted(manager.allocator.free_blocks)
        begun = time.perf_counter()
        if name == "together":
            moved = compact(manager)
        moving = 1e3 * (time.perf_counter() - begun)
        q = torch.ones(len(names), config.num_attention_heads, config.head_dim, dtype=dtype)
        meta = plan_step([chunk_of(manager, one) for one in names], BLOCK, pool.device).meta
        contenders[name] = lambda pool=pool, q=q, meta=meta: pool.attend(0, q, meta)
    timings, runs = take_turns(contenders, 20 if args.quick else 300, "compact", time.process_time), free_runs(free)
    fits = f"requests of {WISH} blocks: {sum(run // WISH for run in runs)} fit in one run, {len(free) // WISH} paged"
    rows = [row_of(f"8 sequences, {name}", timing, timings["scattered"]) for name, timing in timings.items()]
    return [
        row("free blocks", None, None, f"{len(free)} of {SCATTERED - 1} in {len(runs)} runs, the longest {max(runs)}"),
        row("what they can place", None, None, fits),
        *rows,
        row("compact", moving, None, f"{moved} blocks of one layer moved"),
    ]


def fill_with_holes(manager: KvCacheManager) -> list[str]:
    """Let requests of many lengths grow at the same time, then end half of them; return the names of eight."""
    chance, alive = random.Random(0), {}
    while manager.num_free_blocks > WISH:
        name = f"r{len(alive)}"
        manager.allocate(name, [len(alive)])
        alive[name] = chance.randrange(8 * BLOCK, 64 * BLOCK)
        for other in chance.sample(list(alive), k=min(len(alive), 12)):
            held = manager.tables[other].num_tokens
            manager.grow(other, min(alive[other], held + 4 * BLOCK))
    for name in chance.sample(list(alive), k=len(alive) // 2):
        manager.free(name)
        del alive[name]
    return sorted(alive, key=lambda name: manager.tables[name].num_tokens)[-8:]


def free_runs(free: list[int]) -> list[int]:
    """Return the lengths of the runs of adjacent blocks."""
    runs = [0]
    for before, block in zip([None, *free], free, strict=False):
        if before is not None and block != before + 1:
            runs.append(0)
        runs[-1] += 1
    return runs


def chunk_of(manager: KvCacheManager, name: str) -> Chunk:
    """Return a decode of a request's last token."""
    length = manager.tables[name].num_tokens
    request = Request(name, [0] * length, SamplingParams(max_tokens=1))
    return Chunk(request, length - 1, length, manager.tables[name].row)
