"""Lesson 12. Suite `tiers`: loading KV from host memory and disk, against computing it again.

    first   time to the first token of a prompt: computed, from the disk after a restart, from host memory
    chats   chats whose prefixes exceed the pool four times: the pool alone, with host memory, with a disk
    swap    time to the next token of a preempted request: its blocks computed again, or copied back
    gaps    time between the tokens of running requests while the disk is written and read, and while it is not
    saves   time of a prompt's steps without tiers, with blocks read within the steps, and with blocks read beside them
    copies  time to copy a step's blocks out of the pool, in two ways, and back
    compact how much a pool full of holes can place, and the effect of moving its blocks together
    line    bytes/s against tokens/s: where loading wins, and where this machine stands

Random weights of the 0.6B's shape; contenders take turns.
"""

import os
import statistics
import tempfile
import time
from argparse import Namespace
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

from scripts.bench.common import Report
from scripts.bench.options import add_checkpoint, add_choice, checkpoint_of
from scripts.bench.runs import ours, watch
from scripts.bench.tiers_compact import compact_rows
from scripts.bench.tiers_engine import BLOCK, Row, make_engine, prompt_of, row, row_of, seconds_to_first_token, store_of
from scripts.bench.tiers_gaps import gap_rows
from scripts.bench.tiers_saves import copy_rows, save_rows
from scripts.bench.turns import Timing

from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk
from mini_engine.tiers.break_even import measured_rate
from mini_engine.tiers.opening import PROBE_TOKENS, break_evens

PARTS = ("first", "chats", "swap", "gaps", "saves", "copies", "compact", "line")
LENGTH = 4096  # tokens of a long prompt
CHATS, TURNS, OPENING, TURN, NEW = 8, 3, 512, 32, 4
COMPUTED = "computed"


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_checkpoint(parser)
    add_choice(parser, "parts", PARTS)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of all parts but compact (default: cpu)"
    )


def run(args: Namespace) -> Report:
    """Measure the parts asked for. Each part is a few rows of one table."""
    args.checkpoint, measured = checkpoint_of(args), {}
    parts: dict[str, Callable[[Namespace, Path], list[Row]]] = {
        "first": first_rows,
        "chats": chat_rows,
        "swap": swap_rows,
        "gaps": gap_rows,
        "saves": save_rows,
        "copies": copy_rows,
        "compact": compact_rows,
        "line": line_rows,
    }
    for part in args.parts:
        with tempfile.TemporaryDirectory(prefix="kv-course-") as folder:
            measured[part] = parts[part](args, Path(folder))
    note = f"{args.model or args.shape}, {args.dtype}, blocks of {BLOCK} tokens"
    line = measured.pop("line", [])
    return Report("tiers", [{"part": part} | row for part, rows in measured.items() for row in rows], [note], more=line)


def forget_pages(folder: Path) -> None:
    """Ask the system to forget the pages of all files in a folder, so that reading them reads the disk."""
    if hasattr(os, "posix_fadvise"):
        for path in folder.glob("??/*.kv"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the time to the first token of a long prompt, by the location of its K and V."""
    rounds, length = args.rounds or (1 if args.quick else 3), LENGTH // 8 if args.quick else LENGTH
    host = 3 * length * 2**17  # a few prompts
    engine = make_engine(args, length + BLOCK, folder, host)
    prompts = [prompt_of(engine, length, seed) for seed in range(2 * rounds)]
    for prompt in prompts[:rounds]:
        seconds_to_first_token(engine, prompt)
    store_of(engine).tiers.close()
    del engine
    engine = make_engine(args, length + BLOCK, folder, host)
    taken: dict[str, list[float]] = {name: [] for name in (COMPUTED, "disk, after a restart", "host memory")}
    for old, new in zip(prompts[:rounds], prompts[rounds:], strict=True):
        forget_pages(folder)
        for name, prompt in zip(taken, (new, old, old), strict=True):
            taken[name].append(seconds_to_first_token(engine, prompt))
    store_of(engine).tiers.close()
    timings = {name: Timing(each) for name, each in taken.items()}
    return [row_of(f"{length} tokens, {name}", timing, timings[COMPUTED]) for name, timing in timings.items()]


def chat_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the time of chats that take turns in a pool that holds a quarter of their prefixes."""
    tokens, chats = CHATS * OPENING // 4, 3 if args.quick else CHATS
    two_blocks = 2 * BLOCK * 2**18
    engines = {
        "pool alone": lambda: make_engine(args, tokens),
        "with host memory": lambda: make_engine(args, tokens, None, 2**30),
        "with a disk": lambda: make_engine(args, tokens, folder, two_blocks),
    }
    rows = []
    for name, make in engines.items():
        engine = make()
        prompts = chat_prompts(engine, chats)
        seen = watch(ours(engine), [[(prompt, NEW)] for prompt in prompts])
        ms = 1e3 * (seen[-1].now - seen[0].begun)
        found = 100 * (1 - sum(one.prefill_tokens for one in seen) / sum(map(len, prompts)))
        later = statistics.median(one.first_tokens[0] for one in seen[chats:])
        also = f"found {found:.0f} %, first token of later turns {later:.2f} s"
        rows.append(row(name, ms, rows[0]["ms"] / ms if rows else 1.0, also))
        del engine
    return rows


def chat_prompts(engine: Engine, chats: int) -> list[list[int]]:
    """Return the prompts: a turn of each chat, then the next turn of each. Turns are fixed in advance."""
    texts = [prompt_of(engine, OPENING + TURNS * TURN, seed) for seed in range(chats)]
    return [text[: OPENING + turn * TURN] for turn in range(TURNS) for text in texts]


def swap_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the time from a preemption, after which other requests take the blocks, to the next token."""
    rows, rounds = [], args.rounds or (1 if args.quick else 3)
    for length in (64, 256) if args.quick else (64, 256, 1024):
        engine = make_engine(args, length + 4 * BLOCK, None, 2**28)
        taken: dict[str, list[float]] = {COMPUTED: [], "copied back": []}
        for seed in range(rounds):
            for name, each in taken.items():
                each.append(seconds_after_preemption(engine, prompt_of(engine, length, seed), name == COMPUTED))
        timings = {name: Timing(each) for name, each in taken.items()}
        rows += [row_of(f"{length} tokens, {name}", timing, timings[COMPUTED]) for name, timing in timings.items()]
    return rows


def seconds_after_preemption(engine: Engine, prompt: list[int], forget: bool) -> float:
    request = engine.add_request("request", prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    while len(request.output_ids) < 4:
        engine.step()
    engine.scheduler.preempt(request)
    engine.scheduler.manager.coordinator.clear()
    if forget:
        store_of(engine).tiers.host.clear()
    begun = time.perf_counter()
    while len(request.output_ids) < 5:
        engine.step()
    taken = time.perf_counter() - begun
    engine.abort(request.id)
    return taken


def line_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the engine's own measurements, and the number of tokens from which loading wins."""
    engine = make_engine(args, 1024, folder, 2**28)
    rate = measured_rate(partial(prefill, engine), PROBE_TOKENS)
    found = break_evens(rate, folder, store_of(engine).blocks, BLOCK, 0)
    store_of(engine).tiers.close()
    return [
        {
            "tier": name,
            "MB/s": one.bandwidth / 1e6,
            "ms to first byte": 1e3 * one.latency,
            "tokens/s computed": one.prefill_rate,
            "KiB a token": one.bytes_per_token / 1024,
            "wins above MB/s": one.prefill_rate * one.bytes_per_token / 1e6,
            "from tokens": one.num_tokens,
        }
        for name, one in zip(("host memory", "disk"), found.values(), strict=True)
    ]


def prefill(engine: Engine, num_tokens: int) -> None:
    """Compute `num_tokens` tokens in a pool that no request uses."""
    request = Request("probe", [0] * num_tokens, SamplingParams(max_tokens=1))
    engine.runner.run([Chunk(request, 0, num_tokens, array("i", range(1, 1 + -(-num_tokens // BLOCK))))])


def draw(report: Report, path: Path) -> None:
    """Draw bytes/s against tokens/s: the line between computing and loading, and this machine's tiers."""
    from scripts.bench.plot import ACCENT, BAR, INK, MUTED, SOFT, canvas

    if not (rows := report.more):
        raise UserError("only the part 'line' can be drawn; add --parts line, or leave out --plot")
    rates, size = (10.0, 100_000.0), rows[0]["KiB a token"] * 1024
    line = [rate * size / 1e6 for rate in rates]
    words = "Bytes per second of a tier against tokens per second of prefill: above the line, bringing KV back wins"
    with canvas(path, 6.4, 3.8, words) as figure:
        axes = figure.add_axes((0.1, 0.15, 0.86, 0.75))
        axes.fill_between(rates, line, [line[1] * 10] * 2, color=SOFT, linewidth=0)
        axes.plot(rates, line, color=BAR)
        for row in rows:
            axes.plot([row["tokens/s computed"]], [row["MB/s"]], "o", color=ACCENT)
            axes.annotate(
                f"{row['tier']}: {row['MB/s']:,.0f} MB/s",
                (row["tokens/s computed"], row["MB/s"]),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                color=INK,
                fontsize=9,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(rates)
        axes.set_ylim(line[0], line[1] * 10)
        axes.text(14, line[1] * 3, "bring it back", color=INK, fontsize=10)
        axes.text(20_000, line[0] * 4, "compute it again", color=INK, fontsize=10, ha="center")
        axes.set_xlabel("tokens/s that the engine computes")
        axes.set_title("MB/s that a tier gives back", loc="left", fontsize=10, color=MUTED)
