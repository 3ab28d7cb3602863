"""Lesson 12. Suite `tiers`: what comes back from host memory and disk, beside computing it again.

    first   time to the first token of a prompt: computed, from the disk after a restart, from host memory
    chats   chats whose prefixes exceed the pool four times: the pool alone, with host memory, with a disk
    swap    time to the next token of a preempted request: its blocks computed again, or copied back
    gaps    time between the tokens of running requests while the disk is written and read, and while it is not
    compact what a pool full of holes can place, and what moving its blocks together changes
    line    bytes/s against tokens/s: where bringing back wins, and where this machine stands

Random weights of the 0.6B's shape; what is compared takes turns.
"""

import dataclasses
import os
import random
import statistics
import tempfile
import time
from argparse import Namespace
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench.common import Report, Timing, percentile, take_turns
from scripts.bench.peers import checkpoint_of

import torch

from mini_engine import build
from mini_engine.attention.registry import load_kernel
from mini_engine.checkpoint.config import DTYPES, Qwen3Config
from mini_engine.cli.parser import whole_number
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.runner import plan_step
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk, SchedulerConfig
from mini_engine.errors import UserError
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.prefix_cache import caching_manager
from mini_engine.tiers.break_even import measured_rate
from mini_engine.tiers.compact import compact
from mini_engine.tiers.connector import TierConnector
from mini_engine.tiers.keys import chain
from mini_engine.tiers.opening import PROBE_TOKENS, break_evens
from mini_engine.tiers.records import Record, Wanted
from mini_engine.tiers.store import BlockStore

PARTS = ("first", "chats", "swap", "gaps", "compact", "line")
BLOCK = 16
CHATS, TURNS, OPENING, TURN, NEW = 8, 3, 512, 32, 4
DECODING, BEHIND = 4, 256
GAPS = 20  # decode steps in a row, busy or not
SCATTERED, WISH = 2048, 64  # blocks in a pool full of holes, and of a request that wants room there
QUEUED = 4  # records waiting to be written, and to be read, while the tiers are busy
COMPUTED = "computed"

Row = dict[str, Any]


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint (default: random weights)")
    parser.add_argument("--shape", default="0.6B", help="shape of the random weights (default: 0.6B)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all of them")
    parser.add_argument(
        "--length", type=whole_number(2 * BLOCK), default=4096, metavar="N", help="default: 4096 tokens"
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="the disk to measure (default: the temporary one)"
    )


def run(args: Namespace) -> Report:
    """Measure the parts asked for. Each part is a few rows of one table."""
    args.checkpoint, measured = checkpoint_of(args), {}
    parts: dict[str, Callable[[Namespace, Path], list[Row]]] = {
        "first": first_rows,
        "chats": chat_rows,
        "swap": swap_rows,
        "gaps": gap_rows,
        "compact": compact_rows,
        "line": line_rows,
    }
    for part in args.parts:
        with tempfile.TemporaryDirectory(prefix="kv-course-", dir=args.directory) as folder:
            measured[part] = parts[part](args, Path(folder))
    note = f"{args.model or args.shape}, {args.dtype}, blocks of {BLOCK} tokens"
    line = measured.pop("line", [])
    return Report("tiers", [{"part": part} | row for part, rows in measured.items() for row in rows], [note], more=line)


def make_engine(args: Namespace, tokens: int, folder: Path | None = None, host: int | None = None, **limits) -> Engine:
    """Return an engine whose pool holds `tokens` tokens; with a folder or `host` bytes it has tiers."""
    model = build.load(args.checkpoint, args.dtype, "cpu")
    return build.build_engine(
        model,
        num_blocks=1 + -(-tokens // BLOCK),
        block_size=BLOCK,
        scheduler_config=SchedulerConfig(**limits),
        kv_cache_dir=folder,
        kv_host_bytes=host,
        kv_disk_bytes=2**34 if folder else None,
    )


def store_of(engine: Engine) -> BlockStore:
    connector = engine.scheduler.manager.connector
    assert isinstance(connector, TierConnector)
    return connector.block_store


def prompt_of(engine: Engine, length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(engine.config.vocab_size), k=length)


def seconds_to_first_token(engine: Engine, prompt: list[int]) -> float:
    """Run a prompt alone to its first token."""
    begun = time.perf_counter()
    engine.add_request("request", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - begun


def forget_pages(folder: Path) -> None:
    """Ask the system to forget the pages of all files in a folder, so that reading them reads the disk."""
    if hasattr(os, "posix_fadvise"):
        for path in folder.glob("??/*.kv"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def row_of(case: str, timing: Timing, slow: Timing) -> Row:
    """Return a row with the median, the spread, and how many times as fast as `slow` it is."""
    return row(case, 1e3 * timing.median, slow.median / timing.median, f"± {100 * timing.spread:.0f} %")


def row(case: str, ms: float | None, times: float | None, also: str) -> Row:
    """Return a row of the table; `also` says what has no column."""
    return {"case": case, "ms": ms, "times": times, "also": also}


def first_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the time to the first token of a long prompt, by where its K and V are."""
    rounds, length = args.rounds or (1 if args.quick else 3), args.length
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
            engine.scheduler.manager.prefixes.clear()
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
        asked, found, first, begun = 0, 0, [], time.perf_counter()
        for prompt in chat_prompts(engine, chats):
            request = engine.add_request("chat", prompt, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
            arrived = time.perf_counter()
            while not request.output_ids:
                engine.step()
            first.append(time.perf_counter() - arrived)
            while engine.has_unfinished:
                engine.step()
            asked, found = asked + len(prompt), found + request.num_cached_tokens
        ms = 1e3 * (time.perf_counter() - begun)
        later = (
            f"found {100 * found / asked:.0f} %, first token of later turns {statistics.median(first[chats:]):.2f} s"
        )
        rows.append(row(name, ms, rows[0]["ms"] / ms if rows else 1.0, later))
        del engine
    return rows


def chat_prompts(engine: Engine, chats: int) -> list[list[int]]:
    """Return what is asked: a turn of each chat, then the next turn of each. Turns are fixed in advance."""
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
    engine.scheduler.manager.prefixes.clear()
    if forget:
        store_of(engine).tiers.host.clear()
    begun = time.perf_counter()
    while len(request.output_ids) < 5:
        engine.step()
    taken = time.perf_counter() - begun
    engine.abort(request.id)
    return taken


def gap_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the median and the 99th percentile of decode steps beside busy tiers, and beside idle ones."""
    rounds = args.rounds or (2 if args.quick else 20)
    steps = 2 * rounds * GAPS + BLOCK
    engine = make_engine(args, DECODING * (BEHIND + steps + BLOCK), folder, 2**29)
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    requests = [engine.add_request(f"{i}", prompt_of(engine, BEHIND, i), params) for i in range(DECODING)]
    while any(request.is_prefilling for request in requests):
        engine.step()
    feeder, gaps = Feeder(engine), {"idle": [], "busy": []}
    for _ in range(rounds):
        for name, each in gaps.items():
            for _ in range(GAPS):
                if name == "busy":
                    feeder.feed()
                begun = time.perf_counter()
                engine.step()
                each.append(time.perf_counter() - begun)
            feeder.settle()
    store_of(engine).tiers.close()
    idle, busy = ([percentile(each, part) for part in (50, 99)] for each in gaps.values())
    moved = f"{feeder.written / 1e6:.0f} MB/s written and {feeder.read / 1e6:.0f} MB/s read, "
    return [
        row(f"{DECODING} sequences, p99, {name}", 1e3 * last, idle[1] / last, f"{more}median {1e3 * middle:.0f} ms")
        for name, (middle, last), more in zip(gaps, (idle, busy), ("", moved), strict=True)
    ]


class Feeder:
    """Keeps the tiers' threads busy: records to write, and others to read ahead.

    Attributes:
        written, read: bytes per second while it fed.
    """

    def __init__(self, engine: Engine) -> None:
        self.store = store_of(engine)
        self.payload = os.urandom(self.store.blocks.payload_bytes)
        self.count = self.num_read = 0
        self.seconds = 0.0
        self.begun: float | None = None

    def record(self, number: int) -> Record:
        tokens = number.to_bytes(4, "little") * BLOCK
        (key,) = chain(b"feeder", tokens, len(tokens))
        return Record(key, b"feeder".ljust(32), tokens, self.payload)

    def feed(self) -> None:
        """Fill both queues up to QUEUED."""
        self.begun = self.begun or time.perf_counter()
        tiers = self.store.tiers
        while tiers.writer.items.unfinished_tasks < QUEUED:
            tiers.writer.offer(self.record(self.count))
            self.count += 1
        while self.num_read < self.count and tiers.reader.items.unfinished_tasks < QUEUED:
            one = self.record(self.num_read)
            tiers.host.clear()
            tiers.prefetch([Wanted(one.key, one.parent, one.tokens, len(self.payload))])
            self.num_read += 1

    def settle(self) -> None:
        """Wait until both threads are idle."""
        self.store.tiers.flush()
        self.store.tiers.reader.flush(30.0)
        if self.begun is not None:
            self.seconds += time.perf_counter() - self.begun
            self.begun = None

    @property
    def written(self) -> float:
        return self.count * len(self.payload) / self.seconds

    @property
    def read(self) -> float:
        return self.num_read * len(self.payload) / self.seconds


def compact_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the time of one layer's attention over scattered blocks, and over the same blocks moved together."""
    config, dtype = Qwen3Config.from_dir(args.checkpoint), DTYPES[args.dtype]
    config, attend = dataclasses.replace(config, num_hidden_layers=1), load_kernel("auto", "cpu", dtype)
    contenders, moved = {}, 0
    for name in ("scattered", "together"):
        pool = KvPool(config, SCATTERED, BLOCK, attend, dtype, "cpu")
        for layer in (pool.K[0], pool.V[0]):
            layer.normal_()  # so that every block has memory of its own
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
    """Let requests of many lengths grow beside each other, then end half of them; return the names of eight."""
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


def line_rows(args: Namespace, folder: Path) -> list[Row]:
    """Return the engine's own measurements, and from how many tokens on bringing back wins."""
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
    """Compute so many tokens in a pool that no request uses."""
    request = Request("probe", [0] * num_tokens, SamplingParams(max_tokens=1))
    engine.runner.run([Chunk(request, 0, num_tokens, array("i", range(1, 1 + -(-num_tokens // BLOCK))))])


def draw(report: Report, path: Path) -> None:
    """Draw bytes/s against tokens/s: the line between computing and bringing back, and this machine's tiers."""
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
