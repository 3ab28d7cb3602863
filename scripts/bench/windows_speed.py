"""Course machinery. For suite `windows`: decode after a long text, with windows and without.

Both engines run the same random weights with lesson 9's fast layers.
"""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench.behind import decoding, prefill, random_kv
from scripts.bench.options import checkpoint_of, link_or_copy
from scripts.bench.turns import READ_BYTES, clock_of, gather_turns, memory_reader, seconds_of
from scripts.bench.windows_counts import CHUNK, Shape

from mini_engine.assembly import build
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.model import kinds

NEW = 4
FULL, WINDOWS, READ = "full", "windows", "read"


def decode_rows(shape: Shape, args: Namespace) -> list[dict[str, Any]]:
    """Return decode speed with and without windows, by batch size, after `args.history` tokens."""
    plain = checkpoint_of(Namespace(model=None, shape="0.6B", dtype=args.dtype))
    places = {FULL: plain, WINDOWS: with_windows(plain, shape)}
    clock = clock_of(args)
    rounds, rows = args.rounds or (2 if args.quick else 7), []
    for batch in args.batches:
        engines = {name: engine_behind(path, args, batch, rounds) for name, path in places.items()}
        contenders = {name: decoding(engine, NEW, clock) for name, engine in engines.items()}
        contenders[READ] = partial(seconds_of, memory_reader(), clock)
        timings = gather_turns(contenders, rounds, f"{batch} sequences")
        full, windows = (timings[name] for name in (FULL, WINDOWS))
        rows.append(
            {
                "case": f"{batch} × {args.history} tokens",
                "full tokens/s": batch * NEW / full.median,
                "windows tokens/s": batch * NEW / windows.median,
                "times": full.median / windows.median,
                "full ± %": full.spread * 100,
                "windows ± %": windows.spread * 100,
                "read GB/s": READ_BYTES / timings[READ].median / 1e9,
            }
        )
    return rows


def with_windows(plain: Path, shape: Shape) -> Path:
    """Return a directory with the same weights under a config with windows."""
    out = plain.with_name(f"{plain.name}-windows-{shape.window}")
    out.mkdir(exist_ok=True)
    raw = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    types = [kinds.SLIDING if isinstance(kind, kinds.Window) else kinds.FULL for kind in shape.layers]
    raw |= {"use_sliding_window": True, "sliding_window": shape.window, "layer_types": types}
    (out / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    for source in plain.iterdir():
        link_or_copy(source, out)
    return out


def engine_behind(path: Path, args: Namespace, batch: int, rounds: int) -> Engine:
    """Return an engine whose `batch` requests decode after `args.history` tokens that were never computed."""
    filling = batch * (1 + -(-args.history // CHUNK))  # steps in which the first requests are already decoding
    answer = NEW * (rounds + 3) + filling
    length = args.history + answer
    limits = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=CHUNK, chunked_prefill_size=CHUNK)
    model = build.load(path, args.dtype, "cpu")
    num_groups = 4 if any(isinstance(kind, kinds.Window) for kind in model.config.layers) else 1
    blocks = -(-length // 16) * batch * num_groups + 64
    engine = build.build_engine(model, num_blocks=blocks, scheduler_config=limits, enable_prefix_caching=False)
    random_kv(engine)
    prefill(engine.scheduler, batch, args.history, answer)
    return engine
