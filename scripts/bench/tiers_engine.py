"""Course machinery. For suite `tiers`: engines whose pool has host memory and disk below it, and the table's rows."""

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

from scripts.bench.runs import ours, watch
from scripts.bench.turns import Timing

from mini_engine.assembly import build
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.cache_coordinator import cache_of
from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.store import BlockStore

BLOCK = 16
Row = dict[str, Any]


def make_engine(args: Namespace, tokens: int, folder: Path | None = None, host: int | None = None) -> Engine:
    """Return an engine whose pool holds `tokens` tokens; with a folder or `host` bytes it has tiers."""
    model = build.load(args.checkpoint, args.dtype, args.device)
    return build.build_engine(
        model,
        num_blocks=1 + -(-tokens // BLOCK),
        block_size=BLOCK,
        scheduler_config=SchedulerConfig(),
        kv_cache_dir=folder,
        kv_host_bytes=host,
        kv_disk_bytes=2**34 if folder else None,
    )


def store_of(engine: Engine) -> BlockStore:
    connector = cache_of(engine.scheduler.manager).connector
    assert isinstance(connector, TierConnector)
    return connector.block_store


def prompt_of(engine: Engine, length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(engine.config.vocab_size), k=length)


def seconds_to_first_token(engine: Engine, prompt: list[int]) -> float:
    """Run a prompt alone, with nothing in the pool, to its first token."""
    return watch(ours(engine), [[(prompt, 1)]])[0].first_tokens[0]


def row_of(case: str, timing: Timing, slow: Timing) -> Row:
    """Return a row with the median, the spread, and how many times as fast as `slow` it is."""
    return row(case, 1e3 * timing.median, slow.median / timing.median, f"± {100 * timing.spread:.0f} %")


def row(case: str, ms: float | None, times: float | None, also: str) -> Row:
    """Return a row of the table; `also` holds anything without a column."""
    return {"case": case, "ms": ms, "times": times, "also": also}
