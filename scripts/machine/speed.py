"""Course machinery. Speed of decode, prefill and a shared beginning at 1, 8 and 32 requests; on a GPU, of two ways.

The model is random weights of a shape, so nothing is downloaded. Each load runs in turns with reading memory, which
gives its share of the memory rate. The first round of a load warms up, if there is time for another.
"""

import random
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

from scripts.bench.options import checkpoint_of
from scripts.bench.peers import weight_bytes
from scripts.bench.runs import Jobs, Watch, Way, ours, watch
from scripts.bench.turns import measure_rates, memory_reader, read_bytes, seconds_of, synchronized
from scripts.machine.about import GIB, half_dtype, memory_bytes
from scripts.machine.schema import Comparison, Model, Rates, Speed

from mini_engine.assembly.build import assemble
from mini_engine.assembly.choices import with_layers
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.loading import load
from mini_engine.checkpoint.config import DTYPES
from mini_engine.engine.engine import Engine
from mini_engine.engine.scheduler_config import SchedulerConfig

AT_ONCE = (1, 8, 32)
PROMPT, NEW, LONG_PROMPT = 64, 32, 128  # tokens of a decode's prompt and answer, and of a prefill's prompt
COMMON, OWN, SHARED_NEW = 256, 16, 16  # tokens of a shared beginning, after it, and of the answer
STEP_TOKENS = 2048
ROUNDS = 5  # at most, after the warm-up
NEEDED_BYTES = 6 * GIB  # for the larger model, its packed copy, its pool and everything else
LOADS = ("decode", "prefill", "shared beginning")


def shape_for(quick: bool) -> str:
    """Return the shape to measure with: Qwen3-0.6B's, or the small one with --quick or little memory."""
    free = memory_bytes("MemAvailable")
    return "small" if quick or (free is not None and free < NEEDED_BYTES) else "0.6B"


def jobs_of(name: str, at_once: int, vocab_size: int) -> Jobs:
    """Return a load: each prompt with its number of tokens to generate. The same ids in every run."""
    chance = random.Random(at_once)

    def ids(count: int) -> list[int]:
        return chance.choices(range(vocab_size), k=count)

    if name == "decode":
        return [(ids(PROMPT), NEW) for _ in range(at_once)]
    if name == "prefill":
        return [(ids(LONG_PROMPT), 1) for _ in range(at_once)]
    if name == "nothing shared":
        return [(ids(COMMON + OWN), SHARED_NEW) for _ in range(at_once)]
    start = ids(COMMON)
    return [(start + ids(OWN), SHARED_NEW) for _ in range(at_once)]


def in_turns(contenders: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, list[Any]]:
    """Run all contenders in turns for about `seconds`. Return their results, without the first one if there are more.

    `take_turns` has a fixed number of rounds; here one call may take a millisecond or a minute.
    """
    found: dict[str, list[Any]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    for _ in range(ROUNDS + 1):
        for name, run in contenders.items():
            found[name].append(run())
        if time.perf_counter() >= end:
            break
    return {name: results[1:] or results for name, results in found.items()}


class Bench:
    """A model with the fastest parts that work here, and an engine for it."""

    def __init__(self, quick: bool, shape: str | None = None) -> None:
        self.device, self.dtype = half_dtype()
        self.shape = shape or shape_for(quick)
        self.directory = checkpoint_of(Namespace(model=None, shape=self.shape, dtype="bfloat16"))
        self.weight_bytes = weight_bytes(self.directory, DTYPES[self.dtype].itemsize)
        self.model = self.load("auto")
        self.read = synchronized(memory_reader(self.device), self.device)
        self.engine = self.make()

    def load(self, backend: str) -> Any:
        """Return the model with a backend's layers and its own weights."""
        return with_layers(load(self.directory, self.dtype, self.device), backend)

    def make(self, model: Any = None, capture: Any = None, **options: Any) -> Engine:
        """Return an engine whose pool holds the largest load."""
        limits = SchedulerConfig(
            max_num_seqs=AT_ONCE[-1], max_num_batched_tokens=STEP_TOKENS, chunked_prefill_size=STEP_TOKENS
        )
        blocks = AT_ONCE[-1] * -(-(COMMON + OWN + SHARED_NEW) // 16) + 1
        config = EngineConfig(num_blocks=blocks, scheduler_config=limits, **options)
        return assemble(model or self.model, config, capture=capture)

    def about(self) -> Model:
        """Describe the measured model."""
        return Model(self.shape, self.dtype, self.device, round(self.weight_bytes / 1e9, 3))

    def rates(self) -> Rates:
        """Measure the machine without an engine."""
        facts = measure_rates(self.device, dtypes=("float32", self.dtype)).facts()
        return Rates(self.device, facts["read_gb_s"], facts["matrix_gflop_s"])

    def speed(self, load: str, at_once: int, seconds: float) -> Speed:
        """Measure one load."""
        way = ours(self.engine)
        jobs = jobs_of(load, at_once, self.model.config.vocab_size)
        contenders: dict[str, Callable[[], Any]] = {"own": partial(run_once, way, jobs)}
        contenders["read"] = partial(seconds_of, self.read)
        if load == "shared beginning" and at_once > 1:
            others = jobs_of("nothing shared", at_once, self.model.config.vocab_size)
            contenders["others"] = partial(run_once, way, others)
        found = in_turns(contenders, seconds)
        speed = Speed(load, at_once, "ok", runs=len(found["own"]))  # type: ignore[arg-type]
        if load == "decode":
            self.add_decode(speed, found)
            return speed
        tokens = sum(len(ids) if load == "prefill" else wanted for ids, wanted in jobs)
        total = median(seen.figures()["seconds"] for seen in found["own"])
        speed.tokens_per_second = tokens / total
        if "others" in found:
            speed.times = median(seen.figures()["seconds"] for seen in found["others"]) / total
        return speed

    def add_decode(self, speed: Speed, found: Mapping[str, list[Any]]) -> None:
        """Add the figures of decode alone: the time of a step, and its share of the memory rate."""
        step = median(step_seconds(seen) for seen in found["own"])
        history = speed.at_once * (PROMPT + NEW // 2) * self.model.config.kv_bytes_per_token(self.model.dtype)
        reached = read_bytes(self.device) / median(found["read"])
        speed.tokens_per_second, speed.step_ms = speed.at_once / step, step * 1e3
        speed.memory_share = (self.weight_bytes + history) / step / reached


def run_once(way: Way, jobs: Jobs) -> Watch:
    """Run jobs that arrive together, from an empty cache."""
    return watch(way, [jobs])[0]


def step_seconds(seen: Watch) -> float:
    """Return the seconds of a decode step, once every job has its first token."""
    figures = seen.figures()
    return figures["decode_seconds"] * len(seen.answers) / figures["decode_tokens"]


# ---------------------------------------------------------------- two ways to run a step

CAPTURED, EAGER = "captured steps", "eager steps"
TRITON, TORCH = "Triton kernels", "torch alone"
PAIRS = ((CAPTURED, EAGER), (TRITON, TORCH))


class Pairs:
    """Engines to compare on a GPU, each created on first use."""

    def __init__(self, bench: Bench, capture: Any = None) -> None:
        self.bench, self.capture, self.ways = bench, capture, {}

    def engine(self, name: str) -> Engine:
        """Return a way's engine. `capture` stands in for CUDA graphs where there is no GPU, for tests."""
        if name == CAPTURED:
            graphs = {"capture": self.capture} if self.capture else {"cuda_graphs": True, "kernel": "triton"}
            return self.bench.make(**graphs)
        on_gpu = self.bench.device == "cuda"
        if name == TORCH:
            plain = self.bench.load("reference")
            return self.bench.make(plain, kernel="torch", **({"cuda_graphs": False} if on_gpu else {}))
        return self.bench.make(**({"kernel": "triton", "cuda_graphs": False} if on_gpu else {}))

    def way(self, name: str) -> Way:
        """Return a way to run jobs by its name."""
        key = EAGER if name == TRITON else name  # the same engine
        if key not in self.ways:
            self.ways[key] = ours(self.engine(key))
        return self.ways[key]

    def compare(self, first: str, second: str, at_once: int, seconds: float) -> Comparison:
        """Measure decode in two ways, in turns."""
        jobs = jobs_of("decode", at_once, self.bench.model.config.vocab_size)
        found = in_turns({name: partial(run_once, self.way(name), jobs) for name in (first, second)}, seconds)
        one, two = (median(step_seconds(seen) for seen in found[name]) for name in (first, second))
        answers = zip(found[first][-1].answers, found[second][-1].answers, strict=True)
        equal = sum(a == b for a, b in answers)
        return Comparison(first, second, at_once, "ok", one * 1e3, two * 1e3, two / one, equal)
