"""Course machinery. Suite `peers`: our engine against transformers, vLLM, llama.cpp and OpenVINO, each in a process.

Every engine loads the same checkpoint and stays loaded; then all of them run each load in interleaved rounds. An engine
that cannot run here is left out, with the reason. The other engines have environments of their own:

    python scripts/bench.py peers --vllm-python DIR/bin/python      (or the variable MINI_ENGINE_VLLM_PYTHON)

and likewise --llama-cpp and --openvino-python. An engine that takes SLOW times as long as the fastest runs once a load.
The model is a checkpoint of Qwen3-0.6B's shape with random weights, which is written if it does not exist yet.
"""

import argparse
import math
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
from scripts.bench.peer_places import LLAMA, OPENVINO, VLLM, add_places, place_of, vllm_python
from scripts.bench.peer_protocol import Peer, PeerError
from scripts.bench.peer_worker import ENGINES
from scripts.bench.runs import Jobs
from scripts.bench.turns import READ_BYTES, memory_reader, seconds_of
from scripts.make_random_qwen3 import tensor_shapes

import torch

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import DTYPES, Qwen3Config

OURS = "ours"
BEHIND = 64  # tokens of an answer after a long text: the first answers begin before the last prompt is computed
PAUSE = 0.3  # seconds before each run: the previous engine's threads stop spinning within 0.2 s
SLOW = 4


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_checkpoint(parser)
    add_choice(parser, "peers", tuple(ENGINES))
    parser.add_argument(
        "--behind", type=pair, nargs="+", default=[], metavar="NxM", help="instead: decode, N at once after M tokens"
    )
    add_places(parser)


def room_of(args, loads: dict[str, Jobs]) -> dict[str, int]:
    """Return every engine's room: GiB for K and V, tokens of the longest text, and the most requests at once.

    pool_gib is for engines that share their pool; llama.cpp has a slot of `text` tokens for each request at once.
    """
    tokens = max((count * (length + BEHIND) for count, length in args.behind), default=0)
    at_once = max(map(len, loads.values()))
    text = max(len(ids) + wanted for jobs in loads.values() for ids, wanted in jobs)
    pool_gib = 1 + tokens // 9000  # 0.6B's: 9,362 in a GiB
    return {"pool_gib": pool_gib, "longest": max(2048, -(-text // 1024) * 1024), "at_once": at_once, "text": text}


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
    return sum(map(math.prod, shapes.values())) * width


# ---------------------------------------------------------------- engines


def place(name: str, args, stack: ExitStack) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return an engine's Python, additional environment variables, and what else its process must know.

    Raises:
        PeerError: no place was given for it.
    """
    if name == VLLM:
        return *vllm_python(args), {}
    if name == OPENVINO:
        return place_of(name, args), {}, {}
    if name == LLAMA:
        return sys.executable, {}, {"home": place_of(name, args)}
    if name == "ours without a compiler":  # hide the compiler and everything built before
        empty = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peers-", ignore_cleanup_errors=True))
        return sys.executable, {"CXX": str(Path(empty) / "none"), "XDG_CACHE_HOME": empty}, {}
    return sys.executable, {}, {}


def start(name: str, args, model: Path, room: dict[str, int], stack: ExitStack) -> tuple[Peer, dict]:
    """Return the engine's process, with the model loaded and warmed up, and the facts it reported.

    Raises:
        PeerError: the engine cannot run here.
    """
    python, environment, more = place(name, args, stack)
    peer = stack.enter_context(Peer(name, python, environment))
    asked = {"do": "load", "engine": name, "model": str(model.resolve()), "dtype": args.dtype} | room | more
    facts = peer.ask(asked | {"threads": torch.get_num_threads()}, timeout=900)
    chance = random.Random(1)
    for count in (1, 8):
        jobs = [(chance.choices(range(100), k=40), 4) for _ in range(count)]
        peer.ask({"do": "run", "jobs": jobs})
    return peer, facts


def start_all(
    args, model: Path, room: dict[str, int], stack: ExitStack, notes: list[str]
) -> tuple[dict[str, Peer], dict[str, int]]:
    """Return the engines that run here and the bytes of their KV pools; name the others in the notes."""
    ready, pools = {}, {}
    for name in args.peers:
        begun = time.perf_counter()
        try:
            ready[name], facts = start(name, args, model, room, stack)
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
    read, slow = memory_reader(), set()
    for number in range(1, rounds + 1):
        found[""].append(min(seconds_of(read) for _ in range(5)))
        for name, peer in [(name, peer) for name, peer in ready.items() if name not in slow]:
            time.sleep(PAUSE)
            try:
                found[name].append(peer.ask({"do": "run", "jobs": jobs}))
                sys.stderr.write(f"{title}, round {number}: {name} {found[name][-1]['seconds']:.2f} s\n")
            except PeerError as why:
                notes.append(f"left out from here on: {name}; {why}")
                peer.close()
                del ready[name], found[name]
        seconds = {name: found[name][0]["seconds"] for name in ready}
        slow = {name for name, taken in seconds.items() if taken > SLOW * min(seconds.values())}
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
    config = Qwen3Config.from_dir(model)
    vocab_size, token_bytes = config.vocab_size, config.kv_bytes_per_token(DTYPES[args.dtype])
    loads = behind(args.behind, vocab_size) if args.behind else loads_of(vocab_size, args.quick)
    rounds = args.rounds or (1 if args.quick else 3)
    notes = [
        f"{model}, {args.dtype}, {torch.get_num_threads()} threads, {num_bytes / 1e9:.2f} GB of weights read per step; "
        f"medians of {rounds} rounds"
    ]
    rows = []
    with ExitStack() as stack:
        ready, pools = start_all(args, model, room_of(args, loads) | {"token_bytes": token_bytes}, stack, notes)
        for name, jobs in loads.items():
            found = rounds_of(ready, jobs, rounds, notes, name)
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
