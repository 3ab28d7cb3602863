"""Course machinery. Suite `histories`: decode after long texts, ours and transformers': full, windows, latents.

Ours decodes after random keys and values that were never computed, which take as long to read; transformers' cache is
filled by its own prefill, once, and repeated for a batch. Both then take turns. Attention's bandwidth is the bytes of K
and V that a step must read, divided by the time that a step takes longer than one without history.
"""

import copy
import json
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from scripts.bench.behind import decoding, engine_behind
from scripts.bench.common import Report
from scripts.bench.options import add_batches, add_dtype, checkpoint_of, link_or_copy
from scripts.bench.runs import hf_step, load_hf
from scripts.bench.turns import READ_BYTES, gather_turns, memory_reader, seconds_of

import torch

from mini_engine.assembly import build
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.cli.parser import whole_number
from mini_engine.engine.engine import Engine
from mini_engine.model.kinds import FULL, SLIDING, State, Window

CHUNK, WINDOW, NEW = 2048, 1024, 4
OURS, SHORT, HF, READ = "ours", "ours, no history", "transformers", "read"
KINDS = ("full", "windows", "latents")


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_dtype(parser, "bfloat16")
    add_batches(parser, (1, 8))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all of them")
    parser.add_argument(
        "--histories", type=whole_number(1), nargs="+", default=[4096], metavar="N", help="default: 4096"
    )
    parser.add_argument("--no-transformers", action="store_true", help="only ours; transformers' prefill takes minutes")


def run(args: Namespace) -> Report:
    """Measure every kind of layers, history and batch."""
    rows: list[dict[str, Any]] = []
    for kind in args.kinds:
        place = place_of(kind, args.dtype)
        for history in args.histories[:1] if args.quick else args.histories:
            rows += rows_of(kind, place, history, args)
    notes = [
        f"full and windows ({WINDOW} tokens in three layers of four): random weights of the 0.6B's shape; "
        f"latents: the course's pocket-latent; {args.dtype}, {torch.get_num_threads()} threads",
        "K and V, GB/s: bytes of the history over the time that a step takes longer because of it",
    ]
    return Report("histories", rows, notes)


def place_of(kind: str, dtype: str) -> Path:
    if kind == "latents":
        return shipped_checkpoint("pocket-latent")
    plain = checkpoint_of(Namespace(model=None, shape="0.6B", dtype=dtype))
    return plain if kind == "full" else with_windows(plain)


def with_windows(plain: Path) -> Path:
    """Return a directory with the same weights under a config with windows in three layers of four."""
    out = plain.with_name(f"{plain.name}-windows-{WINDOW}")
    out.mkdir(exist_ok=True)
    raw = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    types = [FULL if layer % 4 == 3 else SLIDING for layer in range(raw["num_hidden_layers"])]
    raw |= {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": types}
    (out / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    for source in plain.iterdir():
        link_or_copy(source, out)
    return out


def rows_of(kind: str, place: Path, history: int, args: Namespace) -> list[dict[str, Any]]:
    """Return a row for each batch after one history."""
    rounds = args.rounds or (2 if args.quick else 7)
    rows, filled = [], None
    if not args.no_transformers:
        filled = filled_cache(load_hf(place, args.dtype), history)
    for batch in args.batches[:1] if args.quick else args.batches:
        engine, short = (
            engine_behind(build.load(place, args.dtype, "cpu"), batch, tokens, NEW * (rounds + 3))
            for tokens in (history, 1)
        )
        contenders: dict[str, Callable[[], float]] = {OURS: decoding(engine, NEW, perf_counter)}
        contenders[SHORT] = decoding(short, NEW, perf_counter)
        if filled:
            contenders[HF] = partial(seconds_of, their_steps(*filled, batch))
        contenders[READ] = partial(seconds_of, memory_reader())
        timings = gather_turns(contenders, rounds, f"{kind}, {batch} × {history}")
        ours, read = timings[OURS], READ_BYTES / timings[READ].median / 1e9
        seconds = {name: timing.median / NEW for name, timing in timings.items()}
        longer = max(1e-9, seconds[OURS] - seconds[SHORT])
        speed = history_bytes(engine, history) * batch / longer / 1e9
        theirs = batch / seconds[HF] if filled else None
        rows.append(
            {
                "layers": kind,
                "case": f"{batch} × {history}",
                "tokens/s": batch / seconds[OURS],
                "± %": ours.spread * 100,
            }
            | {"transformers": theirs, "times": batch / seconds[OURS] / theirs if theirs else None}
            | {"K and V, GB/s": speed, "read GB/s": read, "% of it": 100 * speed / read}
        )
    return rows


def history_bytes(engine: Engine, history: int) -> int:
    """Return the bytes of K and V (or of latents) that one decode must read after a history."""
    every = engine.config.kv_bytes_per_token(engine.runner.model.dtype)
    seen = [
        min(history, kind.size) if isinstance(kind, Window) else history
        for kind in engine.config.layers
        if not isinstance(kind, State)
    ]
    return every * sum(seen) // len(seen)


def filled_cache(model, history: int, batch: int = 1):
    """Return transformers' model and its cache of `batch` sequences of random ids."""
    ids = torch.randint(100, (batch, history))
    cache = None
    with torch.inference_mode():
        for start in range(0, history, CHUNK):
            _, cache = hf_step(model, ids[:, start : start + CHUNK], cache, logits_to_keep=1)
    return model, cache


def their_steps(model, cache, batch: int, repeats: bool = True) -> Callable[[], Any]:
    """Return a run of NEW decode steps of transformers on a copy of the cache, for `batch` sequences.

    Args:
        repeats: the cache is of one sequence; otherwise it is of all of them, as caches with states have to be.
    """
    own = copy.deepcopy(cache)
    if repeats:
        own.batch_repeat_interleave(batch)
    token = torch.arange(batch)[:, None]

    def run() -> None:
        with torch.inference_mode():
            for _ in range(NEW):
                logits, _ = hf_step(model, token, own)
                token[:] = logits[:, -1].argmax(-1, keepdim=True)

    return run
