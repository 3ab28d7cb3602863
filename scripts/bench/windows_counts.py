"""Course machinery. For suite `windows`: counts from manager and scheduler, without a model.

Layers, K/V heads, head size and window of the public models: `Olmo3Config` and `MistralConfig` of transformers 5.23,
its conversion script for Gemma 3, and Megatron Bridge's page about gpt-oss.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from scripts.bench.behind import add_requests, without_model
from scripts.bench.hybrid import serve

from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.cache_coordinator import cache_of, coordinated
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.kv.refcount import RefCountedAllocator
from mini_engine.model.kinds import Full, Kind, Window
from mini_engine.windows.groups import group_size, num_window_groups, places_of
from mini_engine.windows.memory import WindowMemory

CHUNK = 512
GIB = 2**30
POOL = 64 * GIB
PROMPTS = (1024, 4096, 16_384, 65_536)


@dataclass(frozen=True)
class Shape:
    """The shape of a model's K and V.

    num_full: the number of layers that see everything, spread evenly. longest: tokens of its longest text.
    """

    name: str
    num_layers: int
    num_full: int
    kv_heads: int
    head_dim: int
    window: int
    longest: int = 131_072
    block_size: int = 16

    @property
    def layers(self) -> list[Kind]:
        """The kind of each layer: full layers, if any, are the last ones of equal groups."""
        every = self.num_layers // self.num_full if self.num_full else self.num_layers + 1
        full = set(list(range(every - 1, self.num_layers, every))[: self.num_full])
        return [Full() if layer in full else Window(self.window) for layer in range(self.num_layers)]

    @property
    def num_groups(self) -> int:
        """Groups with a window."""
        return num_window_groups(places_of(self.layers)) if self.window else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, in bfloat16: K and V of the layers of one group."""
        layers = group_size(places_of(self.layers)) if self.window else self.num_layers
        return layers * self.block_size * self.kv_heads * self.head_dim * 2 * 2

    @property
    def without_windows(self) -> "Shape":
        """The same model with all layers full."""
        return replace(self, num_full=self.num_layers, window=0)

    def manager(self, num_bytes: int, caches: bool = True, first: str = "") -> KvCacheManager:
        """Return a manager for a pool of that size. first: overrides what the tree evicts first."""
        num_blocks = num_bytes // self.block_bytes
        capacity = None if caches else 0
        if not self.window:
            return coordinated(num_blocks, self.block_size, prefixes=partial(PrefixCache, capacity=capacity))
        allocator = RefCountedAllocator(num_blocks, self.block_size)
        memory = WindowMemory(allocator, self.window, self.num_groups, CHUNK)
        told: Any = InOrder(memory, first) if first else memory
        prefixes = partial(PrefixCache, capacity=capacity, memory=told, allocator=allocator)
        return coordinated(num_blocks, self.block_size, prefixes=prefixes)


MODELS = (
    Shape("Gemma 3 27B", 62, 10, 16, 128, 1024),
    Shape("gpt-oss-20b", 24, 12, 8, 64, 128),
    Shape("OLMo 3 7B", 32, 8, 32, 128, 4096, 65_536),
    Shape("Mistral 7B v0.1", 32, 0, 8, 128, 4096, 32_768),
)


class InOrder:
    """A memory that evicts in another order than the engine's.

    first: "leaves": no companion goes before its block. "windows": no block goes before all companions have gone.
    """

    def __init__(self, memory: WindowMemory, first: str) -> None:
        self.memory, self.first = memory, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def trim(self, num_blocks: int) -> None:
        if self.first == "windows":
            self._all(num_blocks)

    def evict(self, num_blocks: int) -> None:
        self._all(num_blocks)

    def _all(self, num_blocks: int) -> None:
        free = self.memory.allocator.num_free
        self.memory.trim(num_blocks)
        self.memory.evict(num_blocks - (self.memory.allocator.num_free - free))


# ---------------------------------------------------------------- memory


def sequence_bytes(shape: Shape, length: int) -> int:
    """Return the bytes that one sequence holds when `length` tokens of it have been computed, in chunks."""
    manager = shape.manager((length // shape.block_size + 8) * (1 + shape.num_groups) * shape.block_bytes, False)
    tokens = [0] * length
    manager.allocate("request", tokens)
    for stop in range(CHUNK, length + CHUNK, CHUNK):
        manager.grow("request", min(stop, length))
        manager.commit("request", tokens, min(stop, length))
    return len(manager.allocator.held) * shape.block_bytes


def model_rows(quick: bool) -> list[dict[str, Any]]:
    """Return, for each public model, the memory of one long sequence, and how many fit in POOL."""
    rows = []
    for shape in MODELS:
        length = 8192 if quick else shape.longest
        full, windowed = sequence_bytes(shape.without_windows, length), sequence_bytes(shape, length)
        rows.append(
            {
                "case": shape.name,
                "full": shape.num_full,
                "windows": shape.num_layers - shape.num_full,
                "W": shape.window,
                "groups": 1 + shape.num_groups,
                "tokens": length,
                "all kept GiB": full / GIB,
                "in groups GiB": windowed / GIB,
                f"fit in {POOL // GIB} GiB": POOL // full,
                "in groups": POOL // windowed,
            }
        )
    return rows


# ---------------------------------------------------------------- requests


def request_rows(shape: Shape, quick: bool) -> list[dict[str, Any]]:
    """Return the number of requests that run at once in 8 GiB, by prompt length; answers have 256 tokens."""
    rows = []
    for length in PROMPTS[:2] if quick else PROMPTS:
        row: dict[str, Any] = {"case": f"prompts of {length} tokens"}
        for name, one in (("Qwen3", shape.without_windows), ("windows", shape)):
            most, mean, preempted = at_once(one.manager(8 * GIB, caches=False), length, 256)
            row |= {f"{name} most": most, f"{name} mean": mean, f"{name} preempted": preempted}
        rows.append(row)
    return rows


def at_once(manager: KvCacheManager, length: int, answer: int) -> tuple[int, float, int]:
    """Run many requests. Return the most that decode at once, the mean, and the number of preemptions."""
    limits = SchedulerConfig(max_num_seqs=512, max_num_batched_tokens=1024, chunked_prefill_size=CHUNK)
    scheduler = Scheduler(manager, limits)
    count = max(8, 2 * 8 * GIB // (28 * 1024) // length)
    add_requests(scheduler, [(length, answer)] * count)
    seen = [len(scheduler.running) for _ in without_model(scheduler)]
    return max(seen), sum(seen) / len(seen), scheduler.num_preemptions


# ---------------------------------------------------------------- hits


def hit_rows(shape: Shape, quick: bool) -> list[dict[str, Any]]:
    """Return the hits of interleaved chats in pools of several sizes, by what the tree evicts first."""
    asked = list(chats(60 if quick else 240))
    rows = []
    for gib in (1, 2) if quick else (1, 2, 4, 8):
        size = int(gib * GIB)
        managers = {
            "Qwen3": shape.without_windows.manager(size),
            "windows": shape.manager(size),
            "no tombstones": shape.manager(size, first="leaves"),
            "all windows first": shape.manager(size, first="windows"),
        }
        rates = {}
        for name, manager in managers.items():
            for prompt, answer in asked:
                serve(manager, prompt, answer)
            rates[f"{name} %"] = 100 * cache_of(manager).prefixes.stats.hit_rate
        rows.append({"case": f"pool of {gib} GiB"} | rates)
    return rows


def chats(requests: int, at_once: int = 12) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompts and answers of chats that take turns, after one of three system prompts or their own documents."""
    chance = random.Random(0)
    systems = [chance.choices(range(50_000), k=length) for length in (90, 410, 1300)]

    def begin() -> tuple[list[int], int]:
        head = chance.choice(systems) if chance.random() < 0.8 else chance.choices(range(50_000), k=3000)
        return list(head), chance.randrange(2, 9)

    talks = [begin() for _ in range(at_once)]
    for _ in range(requests):
        index = chance.randrange(at_once)
        history, turns = talks[index]
        prompt = history + chance.choices(range(50_000), k=chance.randrange(10, 300))
        answer = chance.choices(range(50_000), k=chance.randrange(20, 500))
        yield prompt, answer
        talks[index] = (prompt + answer, turns - 1) if turns > 1 else begin()
