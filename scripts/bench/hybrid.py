"""Course machinery. Suite `hybrid`: memory, checkpoints, a second request, and decode against transformers.

    memory       bytes against sequence length: Qwen3's K and V, and a hybrid's K, V and state
    checkpoints  tokens found and bytes kept against the checkpoint interval
    copies       the cost of copying one request's states
    second       time to the first token of a repeated prompt, and of the same prompt when it was new
    decode       tokens/s at 1, 8 and 16 sequences, ours and transformers', and the limit set by memory
    step         where a decode step's processor time goes: feed-forward, delta nets, other matrices, everything else

All contenders run the same random weights in one process and take turns.
"""

import dataclasses
import random
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench.common import Report
from scripts.bench.hybrid_speed import copy_rows, decode_rows, second_rows, step_rows
from scripts.bench.options import add_batches, add_checkpoint, add_choice, checkpoint_of
from scripts.make_random_qwen3 import config_of, write_json

import torch

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import DTYPES, Qwen3Config
from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.hybrid.memory import StateMemory
from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.cache_coordinator import cache_of, coordinated
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.memory import NO_MEMORY
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.model.kinds import attending, state_bytes

PARTS = ("memory", "checkpoints", "copies", "second", "decode", "step")
LENGTHS = (16, 64, 256, 1024, 4096, 16_384, 65_536)
INTERVALS = (16, 64, 256, 1024)


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_checkpoint(parser, "hybrid-0.6B")
    add_choice(parser, "parts", PARTS)
    add_batches(parser, (1, 8, 16))


def run(args: Namespace) -> Report:
    """Measure the parts asked for, a table each."""
    config, dtype = config_of_shape(args), DTYPES[args.dtype]
    measure: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "memory": lambda: memory_rows(config, dtype),
        "checkpoints": lambda: checkpoint_rows(config, dtype, args.quick),
        "copies": lambda: copy_rows(config, args),
        "second": lambda: second_rows(checkpoint_of(args), args),
        "decode": lambda: decode_rows(checkpoint_of(args), args),
        "step": lambda: step_rows(checkpoint_of(args), args),
    }
    rows = [{"part": part} | row for part in args.parts for row in measure[part]()]
    note = (
        f"{args.model or args.shape}, {args.dtype}: {config.num_gdn_layers} delta nets with "
        f"{state_bytes(config.layers, dtype) / 2**20:.1f} MiB of state, "
        f"{len(attending(config.layers))} attention layers with "
        f"{config.kv_bytes_per_token(dtype) / 2**10:.0f} KiB a token"
    )
    return Report("hybrid", rows, [note])


def config_of_shape(args: Namespace) -> HybridConfig:
    """Return the configuration that is measured; most parts need no weights."""
    if args.model:
        return HybridConfig.from_dir(args.model)
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", config_of(args.shape, args.dtype))
        return HybridConfig.from_dir(Path(folder))


def draw(report: Report, path: Path) -> None:
    """Draw bytes against sequence length, both axes logarithmic: the line and the curve that cross."""
    rows = [row for row in report.rows if row["part"] == "memory" and row["case"].split()[0].isdigit()]
    words = "Memory of one sequence against its length: a Qwen3's grows from nothing, a hybrid's begins with its state"
    draw_memory(rows, words, path, {"Qwen3": 0, "hybrid": 1})


def draw_memory(rows: list[dict[str, Any]], words: str, path: Path, colors: Mapping[str, int]) -> None:
    """Draw MiB of one sequence against its length, a line for each column "… MiB"."""
    from scripts.bench import plot

    if not rows:
        raise UserError("only the part 'memory' can be drawn; add --parts memory, or leave out --plot")
    lengths = [int(row["case"].split()[0]) for row in rows]
    series = {
        name: (lengths, [row[f"{name} MiB"] for row in rows], plot.SERIES[color]) for name, color in colors.items()
    }
    ticks = (2, 8, 32, 128, 512, 2048, 8192)
    plot.lines(path, words, series, "tokens of one sequence", "MiB of K, V and state", lengths, ticks)


def memory_rows(config: HybridConfig, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the bytes of one sequence by length, in a Qwen3 of the same attention heads and in the hybrid."""
    names = {field.name for field in dataclasses.fields(Qwen3Config)}
    qwen3 = Qwen3Config(**{name: getattr(config, name) for name in names})
    per_token, hybrid_token = qwen3.kv_bytes_per_token(dtype), config.kv_bytes_per_token(dtype)
    state = state_bytes(config.layers, dtype)
    even = state / (per_token - hybrid_token)
    return [
        {
            "case": f"{length} tokens" if length else f"even at {even:.0f} tokens",
            "Qwen3 MiB": (length or even) * per_token / 2**20,
            "hybrid MiB": ((length or even) * hybrid_token + state) / 2**20,
        }
        for length in (*LENGTHS, 0)
    ]


def checkpoint_rows(config: HybridConfig, dtype: torch.dtype, quick: bool) -> list[dict[str, Any]]:
    """Return, for each interval, the tokens that chats and shared prompts find, and the checkpoints kept for it.

    Only the manager runs, on numbers: hits do not depend on the weights.
    """
    load, rows = conversation(40 if quick else 200), []
    for interval in (0, *INTERVALS):
        memory = StateMemory(TrackSlots(8, 100_000), 16, interval) if interval else NO_MEMORY
        manager = coordinated(200_000, 16, prefixes=partial(PrefixCache, memory=memory))
        for prompt, answer in load:
            serve(manager, prompt, answer)
        kept = len(memory.checkpoints.slots) if isinstance(memory, StateMemory) else 0
        rows.append(
            {
                "case": f"interval {interval}" if interval else "K and V alone",
                "found %": 100 * cache_of(manager).prefixes.stats.hit_rate,
                "checkpoints": kept,
                "state MiB": kept * state_bytes(config.layers, dtype) / 2**20,
                "KV MiB": cache_of(manager).prefixes.tree.num_blocks * 16 * config.kv_bytes_per_token(dtype) / 2**20,
            }
        )
    return rows


def conversation(requests: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts and answers: chats of four turns with three system prompts, and documents asked about twice."""
    chance = random.Random(0)
    systems = [chance.choices(range(50_000), k=length) for length in (90, 410, 1300)]
    documents = [chance.choices(range(50_000), k=3000) for _ in range(requests // 20 + 1)]
    asked = []
    while len(asked) < requests:
        history = list(chance.choice(systems if chance.random() < 0.8 else documents))
        for _ in range(chance.randrange(1, 5)):
            history = history + chance.choices(range(50_000), k=chance.randrange(10, 120))
            answer = chance.choices(range(50_000), k=chance.randrange(20, 300))
            asked.append((history, answer))
            history = history + answer
    return asked[:requests]


def serve(manager: KvCacheManager, prompt: list[int], answer: list[int]) -> None:
    """Run one request through the manager, without a model."""
    tokens = prompt + answer
    done = manager.allocate("request", prompt)
    while done < len(tokens):
        known = len(prompt) if done < len(prompt) else done + 1
        stop = min(known, done + 512)
        done = manager.chunk_end("request", done, stop)
        manager.grow("request", done)
        manager.commit("request", tokens[: max(done, len(prompt))], done)
    manager.free("request", tokens)
