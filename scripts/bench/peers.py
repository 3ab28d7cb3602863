"""Course machinery. Suite `peers`: our engine against transformers and vLLM's CPU build, each in its own process.

Every engine loads the same checkpoint and stays loaded; then all of them run each load in interleaved rounds. An engine
that cannot run here is left out, with the reason. vLLM needs its own environment:

    python scripts/bench.py peers --vllm-python DIR/bin/python      (or the variable MINI_ENGINE_VLLM_PYTHON)

The model is a checkpoint of Qwen3-0.6B's shape with random weights, which is written if it does not exist yet.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.bench.common import Report
from scripts.bench.options import add_checkpoint, add_choice, checkpoint_of
from scripts.bench.peer_protocol import Peer, PeerError
from scripts.bench.peer_worker import ENGINES
from scripts.bench.runs import Jobs
from scripts.bench.turns import READ_BYTES, memory_reader, seconds_of
from scripts.make_random_qwen3 import num_elements, tensor_shapes

import torch

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import DTYPES, Qwen3Config

VLLM_VARIABLE = "MINI_ENGINE_VLLM_PYTHON"
OURS = "ours"
BEHIND = 64  # tokens of an answer after a long text: the first answers begin before the last prompt is computed
PAUSE = 0.3  # seconds before each run: the previous engine's threads stop spinning within 0.2 s


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_checkpoint(parser)
    add_choice(parser, "peers", tuple(ENGINES))
    parser.add_argument(
        "--behind", type=pair, nargs="+", default=[], metavar="NxM", help="instead: decode, N at once after M tokens"
    )
    parser.add_argument("--vllm-python", metavar="PYTHON", help=f"Python that has vLLM (default: ${VLLM_VARIABLE})")


def room_of(args) -> dict[str, int]:
    """Return every engine's room: GiB for K and V, and the tokens of the longest text."""
    longest = max((length for _, length in args.behind), default=0) + BEHIND
    tokens = max((count * (length + BEHIND) for count, length in args.behind), default=0)
    return {"pool_gib": 1 + tokens // 9000, "longest": max(2048, -(-longest // 1024) * 1024)}  # 0.6B's: 9,362 in a GiB


def pair(text: str) -> tuple[int, int]:
    """Parse 8x4096 (an argparse type)."""
    try:
        count, length = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not requests x tokens, such as 8x4096") from None
    return count, length


# ---------------------------------------------------------------- loads


def loads_of(vocab_size: int, quick: bool) -> dict[str, Jobs]:
    """Return the loads by name: each prompt with the number of tokens it wants."""
    chance = random.Random(0)

    def ids(count: int) -> list[int]:
        return chance.choices(range(vocab_size), k=count)

    loads = {}
    for count in (1, 4) if quick else (1, 8, 16, 32):
        loads[f"decode, {count} at once"] = [(ids(64), 8 if quick else 32) for _ in range(count)]
    ragged, sharing, prompts, common = (4, 4, 2, 128) if quick else (24, 16, 8, 512)
    lengths = [[max(4, int(most * chance.random() ** 2)) for most in (256, 96)] for _ in range(24)]
    loads[f"ragged, {ragged} requests"] = [(ids(own), wanted) for own, wanted in lengths[:ragged]]
    start = ids(common)
    loads[f"shared beginning, {sharing} × ({common} + 16)"] = [(start + ids(16), 16) for _ in range(sharing)]
    loads[f"prefill, {prompts} × 256"] = [(ids(256), 1) for _ in range(prompts)]
    return loads


def behind(pairs: list[tuple[int, int]], vocab_size: int) -> dict[str, Jobs]:
    """Return a load for each (requests, tokens before the answers)."""
    chance = random.Random(0)
    return {
        f"decode, {count} behind {length:,}": [
            (chance.choices(range(vocab_size), k=length), BEHIND) for _ in range(count)
        ]
        for count, length in pairs
    }


def speed(name: str, jobs: Jobs, figures: dict[str, float]) -> float:
    """Return tokens/s: of decode alone, of prompts, or of all answers over the total time, depending on the load."""
    if name.startswith("decode"):
        return figures["decode_tokens"] / figures["decode_seconds"]
    tokens = sum(len(ids) for ids, _ in jobs) if name.startswith("prefill") else sum(wanted for _, wanted in jobs)
    return tokens / figures["seconds"]


def weight_bytes(directory: Path, width: int) -> int:
    """Return the bytes that a decode step must read: all weights except an untied embedding."""
    shapes = tensor_shapes(directory)
    if "lm_head.weight" in shapes:
        del shapes["model.embed_tokens.weight"]
    return sum(map(num_elements, shapes.values())) * width


# ---------------------------------------------------------------- engines


def vllm_python(args) -> tuple[str, dict[str, str]]:
    """Return the Python that has vLLM, and the variables that its documentation advises.

    Raises:
        PeerError: none was named.
    """
    python = args.vllm_python or os.environ.get(VLLM_VARIABLE)
    if not python:
        raise PeerError(f"no environment with vLLM given; use --vllm-python or set {VLLM_VARIABLE}")
    threads = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    return python, {"LD_PRELOAD": str(threads)} if threads.is_file() else {}


def start(name: str, args, model: Path, stack: ExitStack) -> tuple[Peer, dict]:
    """Return the engine's process, with the model loaded and warmed up, and the facts it reported.

    Raises:
        PeerError: the engine cannot run here.
    """
    python, environment = sys.executable, {}
    if name == "vllm":
        python, environment = vllm_python(args)
    if name == "ours without a compiler":  # hide the compiler and everything built before
        empty = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peers-", ignore_cleanup_errors=True))
        environment = {"CXX": str(Path(empty) / "none"), "XDG_CACHE_HOME": empty}
    peer = stack.enter_context(Peer(name, python, environment))
    asked = {"do": "load", "engine": name, "model": str(model.resolve()), "dtype": args.dtype} | room_of(args)
    facts = peer.ask(asked | {"threads": torch.get_num_threads()}, timeout=900)
    chance = random.Random(1)
    for count in (1, 8):
        jobs = [(chance.choices(range(100), k=40), 4) for _ in range(count)]
        peer.ask({"do": "run", "jobs": jobs})
    return peer, facts


def start_all(args, model: Path, stack: ExitStack, notes: list[str]) -> tuple[dict[str, Peer], dict[str, int]]:
    """Return the engines that run here and the bytes of their KV pools; name the others in the notes."""
    ready, pools = {}, {}
    for name in args.peers:
        begun = time.perf_counter()
        try:
            ready[name], facts = start(name, args, model, stack)
            sys.stderr.write(f"{name} is ready, {time.perf_counter() - begun:.0f} s\n")
            pools[name] = facts["pool_bytes"]
            notes.append(f"{name}: {facts['version']}")
        except PeerError as why:
            notes.append(f"left out: {name}; {why}")
    if not ready:
        raise UserError(f"no engine can run: {'; '.join(notes)}")
    return ready, pools


# ---------------------------------------------------------------- rounds


def rounds_of(ready: dict[str, Peer], jobs: Jobs, rounds: int, notes: list[str], title: str = "") -> dict[str, list]:
    """Return every engine's figures for a load, in interleaved rounds. An engine that fails is dropped.

    The key "" holds the seconds for reading READ_BYTES in each round.
    """
    found: dict[str, list] = {name: [] for name in ("", *ready)}
    read = memory_reader()
    for number in range(1, rounds + 1):
        found[""].append(min(seconds_of(read) for _ in range(5)))
        for name, peer in list(ready.items()):
            time.sleep(PAUSE)
            try:
                found[name].append(peer.ask({"do": "run", "jobs": jobs}))
                sys.stderr.write(f"{title}, round {number}: {name} {found[name][-1]['seconds']:.2f} s\n")
            except PeerError as why:
                notes.append(f"left out from here on: {name}; {why}")
                peer.close()
                del ready[name], found[name]
    return found


def rows_of(load: str, jobs: Jobs, found: dict[str, list], num_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield a row per engine. With a single sequence, decode reads all weights for each token."""
    read = READ_BYTES / statistics.median(found.pop(""))
    speeds = {name: [speed(load, jobs, each) for each in figures] for name, figures in found.items()}
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    for name, median in medians.items():
        low, high = min(speeds[name]), max(speeds[name])
        share = 100 * median * num_bytes / read if load == "decode, 1 at once" else None
        yield {
            "load": load,
            "engine": name,
            "tokens/s": median,
            "lowest": low,
            "highest": high,
            "ours is ×": medians[OURS] / median if OURS in medians else None,
            "% of memory": share,
        }


def run(args) -> Report:
    """Measure every load on every engine that runs here."""
    model = checkpoint_of(args)
    num_bytes = weight_bytes(model, DTYPES[args.dtype].itemsize)
    vocab_size = Qwen3Config.from_dir(model).vocab_size
    loads = behind(args.behind, vocab_size) if args.behind else loads_of(vocab_size, args.quick)
    notes = [
        f"{model}, {args.dtype}, {torch.get_num_threads()} threads, {num_bytes / 1e9:.2f} GB of weights read per step"
    ]
    rows = []
    with ExitStack() as stack:
        ready, pools = start_all(args, model, stack, notes)
        for name, jobs in loads.items():
            found = rounds_of(ready, jobs, args.rounds or (1 if args.quick else 3), notes, name)
            read = READ_BYTES / statistics.median(found[""]) / 1e9
            notes.append(f"{name}: memory read at {read:.1f} GB/s in the same rounds")
            rows += rows_of(name, jobs, found, num_bytes)
        peaks = {name: peer.quit() for name, peer in ready.items()}
    more = [
        {"engine": name, "peak memory, GB": peak / 1e9, "its KV pool, GB": pools[name] / 1e9}
        | {"× weights and pool": peak / (num_bytes + pools[name])}
        for name, peak in peaks.items()
        if peak
    ]
    return Report("peers", rows, notes, more=more)
