"""Course machinery. Suite `hybrid`: memory, checkpoints, a second request, and decode beside transformers.

    memory       bytes against sequence length: Qwen3's K and V, and a hybrid's K, V and state
    checkpoints  tokens found and bytes kept against the checkpoint interval
    copies       what it costs to copy one request's states
    second       time to the first token of a prompt that was asked before, beside the first time
    decode       tokens/s at 1, 8 and 16 sequences beside transformers, and the limit that memory sets
    step         where a decode step's processor time goes: feed-forward, delta nets, other matrices, everything else

All contenders run the same random weights in one process and take turns.
"""

import dataclasses
import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench.common import READ_BYTES, Report, Timing, memory_reader, take_turns
from scripts.bench.peers import checkpoint_of
from scripts.bench.step import batch_list
from scripts.make_random_qwen3 import config_of, write_json

import torch

from mini_engine import build
from mini_engine.checkpoint.config import DTYPES, Qwen3Config
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import SchedulerConfig
from mini_engine.errors import UserError
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.hybrid.memory import StateMemory
from mini_engine.hybrid.store import HybridKv
from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.prefix_cache import PrefixCache
from mini_engine.layers.packed_layers import PackedLinear

PARTS = ("memory", "checkpoints", "copies", "second", "decode", "step")
LENGTHS = (16, 64, 256, 1024, 4096, 16_384, 65_536)
INTERVALS = (16, 64, 256, 1024)
PROMPT, NEW = 32, 8
OURS, HF, READ = "ours", "transformers", "read"


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--model", type=Path, metavar="DIR", help="a hybrid checkpoint (default: random weights)")
    parser.add_argument("--shape", default="hybrid-0.6B", help="shape of the random weights (default: hybrid-0.6B)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all of them")
    parser.add_argument("--batches", type=batch_list, default=(1, 8, 16), metavar="1,8,…", help="default: 1,8,16")


def run(args: Namespace) -> Report:
    """Measure the parts asked for. Each part is a few rows of one table."""
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
    columns = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{name: row.get(name) for name in columns} for row in rows]
    note = (
        f"{args.model or args.shape}, {args.dtype}: {config.num_gdn_layers} delta nets with "
        f"{config.state_bytes(dtype) / 2**20:.1f} MiB of state, {config.num_full_layers} attention layers with "
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
    from scripts.bench.plot import BAR, MUTED, SERIES, canvas

    rows = [row for row in report.rows if row["part"] == "memory" and row["case"].endswith("tokens")]
    points = [(int(row["case"].split()[0]), row) for row in rows if row["case"].split()[0].isdigit()]
    if not points:
        raise UserError("only the part 'memory' can be drawn; add --parts memory, or leave out --plot")
    words = "Memory of one sequence against its length: a Qwen3's grows from nothing, a hybrid's begins with its state"
    with canvas(path, 6.4, 3.6, words) as figure:
        axes = figure.add_axes((0.12, 0.17, 0.83, 0.72))
        for name, color in (("Qwen3 MiB", BAR), ("hybrid MiB", SERIES[1])):
            axes.plot([x for x, _ in points], [row[name] for _, row in points], color=color, label=name.split()[0])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks([x for x, _ in points], [f"{x:,}" for x, _ in points])
        axes.set_yticks([2, 8, 32, 128, 512, 2048, 8192], ["2", "8", "32", "128", "512", "2,048", "8,192"])
        axes.set_xlabel("tokens of one sequence")
        axes.set_title("MiB of K, V and state", loc="left", fontsize=10, color=MUTED)
        axes.legend()


def memory_rows(config: HybridConfig, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the bytes of one sequence by length, in a Qwen3 of the same attention heads and in the hybrid."""
    names = {field.name for field in dataclasses.fields(Qwen3Config)}
    qwen3 = Qwen3Config(**{name: getattr(config, name) for name in names})
    per_token, hybrid_token = qwen3.kv_bytes_per_token(dtype), config.kv_bytes_per_token(dtype)
    state = config.state_bytes(dtype)
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
    """Return, for each interval, what chats and shared prompts find, and the checkpoints that are kept for it.

    Only the manager runs, on numbers: what is found does not depend on the weights.
    """
    load, rows = conversation(40 if quick else 200), []
    for interval in (0, *INTERVALS):
        memories = [StateMemory(TrackSlots(8, 100_000), 16, interval)] if interval else []
        cache = partial(PrefixCache, places=memories[0]) if memories else PrefixCache
        manager = KvCacheManager(200_000, 16, prefixes=cache, memories=memories)
        for prompt, answer in load:
            serve(manager, prompt, answer)
        kept = sum(len(memory.checkpoints.slots) for memory in memories)
        rows.append(
            {
                "case": f"interval {interval}" if interval else "K and V alone",
                "found %": 100 * manager.prefixes.stats.hit_rate,
                "checkpoints": kept,
                "state MiB": kept * config.state_bytes(dtype) / 2**20,
                "KV MiB": manager.prefixes.tree.num_blocks * 16 * config.kv_bytes_per_token(dtype) / 2**20,
            }
        )
    return rows


def conversation(requests: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts and answers: chats of four turns behind three system prompts, and documents asked about twice."""
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
        done = min([stop, *(memory.chunk_end("request", done, stop) for memory in manager.memories)])
        manager.grow("request", done)
        manager.commit("request", tokens[: max(done, len(prompt))], done)
    manager.free("request", tokens)


def copy_rows(config: HybridConfig, args: Namespace) -> list[dict[str, Any]]:
    """Return the time of `copy_states` and `reset_states`, beside reading as many bytes."""
    dtype = DTYPES[args.dtype]
    pool = GdnPool.for_model(config, 8, dtype=dtype, max_track_slots=8)
    size = config.state_bytes(dtype)
    contenders = {
        "copy_states": lambda: [pool.copy_states(1 + i, 9 + i) for i in range(8)],
        "reset_states": lambda: [pool.reset_states([1 + i]) for i in range(8)],
        READ: memory_reader(),
    }
    timings = take_turns(contenders, args.rounds or (3 if args.quick else 15), "copies")
    rate = READ_BYTES / timings[READ].median
    return [
        {
            "case": f"{name}, {size / 2**20:.1f} MiB",
            "ms": timings[name].median / 8 * 1e3,
            "ms at read speed": touched * size / rate * 1e3,
        }
        for name, touched in (("copy_states", 2), ("reset_states", 1))
    ]


def fast_engine(directory: Path, args: Namespace, batch: int, length: int, **options) -> Engine:
    """Return our engine with its fast parts; its pool holds `batch` sequences of `length` tokens."""
    limits = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=max(512, batch))
    blocks = 2 + 2 * batch * -(-length // 16)
    model = build.load(directory, args.dtype, "cpu")
    return build.build_engine(model, num_blocks=blocks, scheduler_config=limits, **options)


def second_rows(directory: Path, args: Namespace) -> list[dict[str, Any]]:
    """Return the time to the first token of a prompt that is new, and of the same prompt again."""
    lengths = (256,) if args.quick else (256, 1024)
    engine = fast_engine(directory, args, 4, max(lengths) * (args.rounds or 5) * 2, max_track_slots=64)
    rows, chance = [], random.Random(0)
    for length in lengths:
        first, second = [], []
        for _ in range(args.rounds or (1 if args.quick else 3)):
            prompt = chance.choices(range(engine.config.vocab_size), k=length)
            for seconds in (first, second):
                seconds.append(time_to_first_token(engine, prompt))
        cold, warm = statistics.median(first), statistics.median(second)
        rows.append({"case": f"{length} tokens", "first ms": cold * 1e3, "again ms": warm * 1e3, "times": cold / warm})
    return rows


def time_to_first_token(engine: Engine, prompt: list[int]) -> float:
    begun = time.perf_counter()
    engine.add_request("request", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - begun


def decode_rows(directory: Path, args: Namespace) -> list[dict[str, Any]]:
    """Return decode speed beside transformers' by batch size. Both decode behind a prompt of PROMPT tokens."""
    rows = []
    hf = load_transformers(directory, args)
    engine = fast_engine(directory, args, max(args.batches), PROMPT + 4 * NEW, enable_prefix_caching=False)
    config = engine.config
    assert isinstance(config, HybridConfig)
    for batch in args.batches:
        prompts = some_prompts(config, batch)
        contenders = {OURS: our_decode(engine, prompts), HF: their_decode(hf, prompts), READ: timed(memory_reader())}
        timings = in_turns(contenders, args.rounds or (1 if args.quick else 5))
        ours, theirs = (timings[name] for name in (OURS, HF))
        limit = READ_BYTES / timings[READ].median / bytes_touched(directory, config, batch, args) * batch
        rows.append(
            {
                "case": f"{batch} sequences",
                "ours tokens/s": batch * NEW / ours.median,
                "transformers tokens/s": batch * NEW / theirs.median,
                "times": theirs.median / ours.median,
                "memory limit tokens/s": limit,
                "of the limit %": 100 * batch * NEW / ours.median / limit,
            }
        )
    return rows


def in_turns(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, Timing]:
    """Run every contender once to warm up, then `rounds` times in turn; each returns the seconds that count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            taken = run()
            if turn:
                seconds[name].append(taken)
    return {name: Timing(taken) for name, taken in seconds.items()}


def timed(run: Callable[[], Any]) -> Callable[[], float]:
    """Return a contender that times the whole of `run`."""

    def call() -> float:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    return call


def load_transformers(directory: Path, args: Namespace):
    """Return the same weights in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[args.dtype]).eval()


def bytes_touched(directory: Path, config: HybridConfig, batch: int, args: Namespace) -> int:
    """Return the bytes that a decode step must read or write: weights once, K and V, and each state twice."""
    dtype, weights = DTYPES[args.dtype], (directory / "model.safetensors").stat().st_size
    return weights + batch * (2 * config.state_bytes(dtype) + PROMPT * config.kv_bytes_per_token(dtype))


def some_prompts(config: HybridConfig, count: int) -> list[list[int]]:
    """Return random prompts of PROMPT tokens."""
    return [random.Random(i).choices(range(config.vocab_size), k=PROMPT) for i in range(count)]


def begin(engine: Engine, prompts: list[list[int]], max_tokens: int) -> None:
    """End the requests that there are, add these, and run until all of them decode."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    requests = [engine.add_request(f"{i}", prompt, params) for i, prompt in enumerate(prompts)]
    while any(request.is_prefilling for request in requests):
        engine.step()


def our_decode(engine: Engine, prompts: list[list[int]]) -> Callable[[], float]:
    """Return a run of NEW decode steps behind the prompts."""

    def run() -> float:
        begin(engine, prompts, 3 * NEW)
        begun = time.perf_counter()
        for _ in range(NEW):
            engine.step()
        return time.perf_counter() - begun

    return run


def their_decode(hf, prompts: list[list[int]]) -> Callable[[], float]:
    """Return a run of NEW decode steps of transformers behind the prompts, with its own cache."""

    @torch.inference_mode()
    def run() -> float:
        out = hf(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
        begun = time.perf_counter()
        for _ in range(NEW):
            out = hf(tokens, past_key_values=cache, use_cache=True)
            tokens = out.logits[:, -1:].argmax(-1)
        return time.perf_counter() - begun

    return run


def step_rows(directory: Path, args: Namespace) -> list[dict[str, Any]]:
    """Return the processor time of a decode step and of its largest parts, medians, by batch size.

    "the rule alone" is the delta nets' recurrence without the matrices around it, measured by itself.
    """
    rounds = 4 if args.quick else 3 * (args.rounds or 7)
    length = PROMPT + rounds + 4
    engine = fast_engine(directory, args, max(args.batches), length, enable_prefix_caching=False)
    runner = engine.runner
    assert isinstance(runner, ModelRunner) and isinstance(engine.config, HybridConfig)
    if runner.pool.native_step is None:
        raise UserError("the part 'step' measures lesson 9's packed layers, which do not work here; leave it out")
    watch, native = Stopwatch(), runner.pool.native_step
    watch.over(native, "feed_forward", "feed-forward ms")
    watch.over(native, "delta_net", "delta nets ms")
    for module in runner.model.modules():  # those of attention, and the head; the others are in the two calls above
        if isinstance(module, PackedLinear):
            watch.over(module, "forward", "other matrices ms")
    rows, read = [], memory_reader()
    for batch in args.batches:
        begin(engine, some_prompts(engine.config, batch), rounds + 2)
        engine.step()
        taken, reads = [], []
        for _ in range(rounds):
            taken.append(watch.of(engine.step))
            reads.append(Stopwatch().of(read)["CPU ms"])
        limit = bytes_touched(directory, engine.config, batch, args) / READ_BYTES * statistics.median(reads) * 1e3
        medians = {name: statistics.median(one[name] for one in taken) * 1e3 for name in taken[0]}
        alone = rule_alone(engine.config, runner.pool, batch, rounds)
        rows.append({"case": f"{batch} sequences"} | medians | {"the rule alone ms": alone, "memory limit ms": limit})
    return rows


def rule_alone(config: HybridConfig, store: HybridKv, batch: int, rounds: int) -> float:
    """Return the milliseconds of processor time that `batch` sequences' states take in one step, the median."""
    dtype, step = store.states.conv_state.dtype, store.native_step
    assert step is not None
    heads = config.linear_num_value_heads
    qkv, weight = (
        torch.zeros(batch, config.conv_dim, dtype=dtype),
        torch.zeros(config.conv_dim, step.sizes["taps"], dtype=dtype),
    )
    g, beta, slots = torch.zeros(batch, heads), torch.zeros(batch, heads), torch.arange(1, batch + 1)
    taken = []
    for _ in range(rounds):
        begun = time.process_time()
        for layer in range(config.num_gdn_layers):
            step(*store.states.get_layer_state(layer), qkv, g, beta, weight, slots, slots)
        taken.append(time.process_time() - begun)
    return statistics.median(taken) * 1e3


class Stopwatch:
    """Adds up the processor time of a step's parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def over(self, owner: Any, method: str, part: str) -> None:
        """Count the time of every later call of `owner`'s method under the name `part`."""
        inner = getattr(owner, method)
        self.seconds[part] = 0.0

        def call(*arguments):
            begun = time.process_time()
            result = inner(*arguments)
            self.seconds[part] += time.process_time() - begun
            return result

        setattr(owner, method, call)

    def of(self, step: Callable[[], Any]) -> dict[str, float]:
        """Run a step; return the seconds of the whole, of each part, and of everything else."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        begun = time.process_time()
        step()
        whole = time.process_time() - begun
        return {"CPU ms": whole} | self.seconds | {"else ms": whole - sum(self.seconds.values())}
