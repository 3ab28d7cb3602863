"""Course machinery. The rungs of the ladder: each lesson's own way of running one load, instrumented.

A rung is `run(load) -> Pass`. The lessons' code runs unchanged; the figures come from what it keeps anyway: a step's
plan, the request's tokens, the manager's count of blocks. All requests arrive at once, and all pools are equally large.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

import torch

from lessons.l3_block_tensor.packed import step
from mini_engine.assembly.llm import LLM
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine
from mini_engine.engine.loop import generate
from mini_engine.engine.offline import generate_all
from mini_engine.engine.runner import ModelRunner, Runner
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk
from mini_engine.kv import block_tensor, contiguous, no_cache, token_flat
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.manager import KvCacheManager

BLOCK_SIZE = 16
Job = tuple[list[int], int]  # prompt, tokens wanted


@dataclass(frozen=True)
class Load:
    """The work that every lesson does.

    jobs: prompts with a shared prefix, and the number of tokens each wants.
    longest: maximum tokens of a text; a lesson that reserves in advance reserves this many.
    pool_blocks: blocks that all requests together may hold.
    """

    jobs: list[Job]
    longest: int
    pool_blocks: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.jobs)

    @property
    def new_tokens(self) -> int:
        return sum(wanted for _, wanted in self.jobs)


def make_load(requests: int, vocab_size: int, common: int, own: int, answer: int, share: float) -> Load:
    """Return a load of mostly short prompts and answers, with a pool of `share` of their total need."""
    chance = random.Random(0)

    def length(least: int, most: int) -> int:
        return least + int((most - least) * chance.random() ** 2)

    start = chance.choices(range(vocab_size), k=common)
    jobs = [
        (start + chance.choices(range(vocab_size), k=length(4, own)), length(min(8, answer), answer))
        for _ in range(requests)
    ]
    needs = [-(-(len(prompt) + wanted) // BLOCK_SIZE) for prompt, wanted in jobs]
    longest = -(-(common + own + answer) // BLOCK_SIZE) * BLOCK_SIZE
    return Load(jobs, longest, max(max(needs), int(share * sum(needs))))


@dataclass
class Pass:
    """One run of the load.

    came: seconds from the start, when all requests arrive, and number of the request, for every token, in order.
    fed: tokens that went through the model.
    held, used, running: per step, the slots held, those of them with KV, and the running requests.
    """

    answers: list[list[int]] = field(default_factory=list)
    came: list[tuple[float, int]] = field(default_factory=list)
    fed: int = 0
    held: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    def note_tokens(self, requests: Iterable[int]) -> None:
        """Record that these requests, by number, get a token now."""
        now = time.perf_counter() - self.begun
        self.came += [(now, request) for request in requests]

    def note_step(self, fed: int, held: int, used: int, running: int) -> None:
        """Record a step."""
        self.fed += fed
        self.held.append(held)
        self.used.append(used)
        self.running.append(running)

    @property
    def first_tokens(self) -> list[float]:
        """Seconds from the start to the first token of each request."""
        return list({request: seconds for seconds, request in reversed(self.came)}.values())

    def figures(self, load: Load, bytes_per_token: int) -> dict[str, float | None]:
        """Return the table's figures except for the speed. waste is None if nothing is held."""
        held, used = sum(self.held), sum(self.used)
        decoded = load.new_tokens - len(load.jobs)  # the first token of an answer comes from the prefill
        return {
            "first_token_s": mean(self.first_tokens),
            "running": mean(self.running),
            "kv_mib": max(self.held) * bytes_per_token / 2**20,
            "kv_kib_a_request": held / sum(self.running) * bytes_per_token / 2**10,
            "waste": (held - used) / held if held else None,
            "prefill_tokens": self.fed - decoded,
        }


class Observed:
    """Wraps a stage's sequence for lesson 0's loop and records each step."""

    def __init__(self, sequence, done: Pass, slots_held: Callable[[], int]) -> None:
        self.sequence, self.done, self.slots_held = sequence, done, slots_held

    def plan(self, token_ids: list[int]):
        return self.sequence.plan(token_ids)

    def commit(self, meta) -> None:
        self.sequence.commit(meta)
        self.done.note_tokens([len(self.done.answers)])
        held = self.slots_held()
        self.done.note_step(len(meta.positions), held, int(meta.positions[-1]) + 1 if held else 0, 1)


def one_by_one(model, load: Load, begin: Callable) -> Pass:
    """Run lessons 0, 1 and 2: one request after the other.

    Args:
        begin: given a prompt, returns the store, the sequence, a count of the slots held, and a cleanup function.
    """
    done = Pass()
    for prompt, wanted in load.jobs:
        kv, sequence, slots_held, end = begin(prompt)
        done.answers.append(generate(model, kv, Observed(sequence, done, slots_held), prompt, wanted))
        end()
    return done


def nothing() -> None:
    """Clean up after a request that holds nothing."""


def lesson_0(model) -> Callable[[Load], Pass]:
    """Return a run without a cache."""
    device = model.device
    return lambda load: one_by_one(
        model, load, lambda prompt: (no_cache.NoCache(), no_cache.Recompute(device), lambda: 0, nothing)
    )


def lesson_1(model, load: Load) -> Callable[[Load], Pass]:
    """Return a run with one row for the longest possible text, reused for one request after the other."""
    kv = contiguous.ContiguousKv(model.config, load.longest, model.dtype, model.device)
    return lambda load: one_by_one(
        model, load, lambda prompt: (kv, contiguous.CachedSequence(kv), lambda: kv.max_seq_len, nothing)
    )


def lesson_2(model, load: Load) -> Callable[[Load], Pass]:
    """Return a run with blocks from a pool, still one request after the other."""
    slots = load.pool_blocks * BLOCK_SIZE
    pool = token_flat.FlatKvPool(model.config, slots, model.dtype, model.device)
    allocator = BlockAllocator.for_slots(slots, BLOCK_SIZE)

    def begin(prompt: list[int]):
        sequence = token_flat.PagedSequence(token_flat.FlatRequest(list(prompt)), pool, allocator)
        return pool, sequence, lambda: len(allocator.held) * BLOCK_SIZE, sequence.release

    return lambda load: one_by_one(model, load, begin)


def lesson_3(model, load: Load) -> Callable[[Load], Pass]:
    """Return a run in static batches: as many requests as the pool can hold until they finish, then the next batch."""
    num_blocks = load.pool_blocks + 1
    kernel = load_kernel("auto", model.device, model.dtype)
    pool = block_tensor.KvPool(model.config, num_blocks, BLOCK_SIZE, kernel, model.dtype, model.device)
    allocator = BlockAllocator(num_blocks, BLOCK_SIZE)

    @torch.inference_mode()
    def run(load: Load) -> Pass:
        done = Pass()
        for batch in batches(load):
            requests = [block_tensor.PackedRequest(list(prompt), BlockTable(allocator)) for prompt, _ in batch]
            numbered = enumerate((count for _, count in batch), len(done.answers))
            jobs = {id(request): job for request, job in zip(requests, numbered, strict=True)}  # number, tokens wanted
            running = requests
            while running:
                before = sum(request.cur_len for request in running)
                step(model, pool, running, BLOCK_SIZE)
                done.note_tokens(jobs[id(request)][0] for request in running)
                used = sum(request.cur_len for request in running)
                done.note_step(used - before, len(allocator.held) * BLOCK_SIZE, used, len(running))
                for request in running:
                    if len(request.output_ids) == jobs[id(request)][1]:
                        request.table.free()
                running = [request for request in running if request.table.blocks]
            done.answers += [request.output_ids for request in requests]
        return done

    return run


def batches(load: Load) -> list[list[Job]]:
    """Split the jobs in order, so that the pool has room for all prompts and answers of a batch."""
    found, left = [], 0
    for prompt, wanted in load.jobs:
        need = -(-(len(prompt) + wanted - 1) // BLOCK_SIZE)
        if need > left:
            found.append([])
            left = load.pool_blocks
        found[-1].append((prompt, wanted))
        left -= need
    return found


def engine_rung(model, load: Load, manager: Callable[..., KvCacheManager]) -> Callable[[Load], Pass]:
    """Return a run of lesson 5's engine with that manager, starting from an empty cache."""
    seen: dict[str, int] = {}

    def look() -> None:  # before requests finish, so that all their slots count
        held = tables.blocks_by_state.held * BLOCK_SIZE
        empty = sum(table.num_slots - table.num_tokens for table in tables.tables.values())
        seen.update(held=held, used=held - empty, running=len(tables.tables))

    def runner(model, pool) -> Looking:
        return Looking(ModelRunner(model, pool), look)

    num_blocks = load.pool_blocks + 1
    engine = Engine.for_model(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, manager=manager, runner=runner)
    tables = engine.scheduler.manager

    def run(load: Load) -> Pass:
        tables.coordinator.clear()
        done = Pass()
        requests = [engine.add_request(str(i), prompt, exactly(wanted)) for i, (prompt, wanted) in enumerate(load.jobs)]
        while engine.has_unfinished:
            result = engine.step()
            done.note_step(result.stats.prefill_tokens + result.stats.decode_tokens, **seen)
            done.note_tokens(map(int, result.new_tokens))
        done.answers = [request.output_ids for request in requests]
        return done

    return run


def exactly(wanted: int, asked: SamplingParams | None = None) -> SamplingParams:
    """Return parameters for exactly `wanted` tokens; greedy unless `asked` says otherwise."""
    return replace(asked or SamplingParams(temperature=0), max_tokens=wanted, ignore_eos=True)


def offline_rung(model, load: Load, asked: SamplingParams | None = None) -> Callable[[Load], Pass]:
    """Return a run of lesson 5 without instrumentation; with `asked`, lesson 4's sampler works too."""
    engine = Engine.for_model(model, num_blocks=load.pool_blocks + 1, block_size=BLOCK_SIZE)

    def run(load: Load) -> Pass:
        params = [exactly(wanted, asked) for _, wanted in load.jobs]
        completions = generate_all(engine, [prompt for prompt, _ in load.jobs], params, progress=False)
        return Pass(answers=[completion.token_ids for completion in completions])

    return run


def text_rung(model, load: Load, tokenizer) -> Callable[[Load], Pass]:
    """Return a run of lesson 6: every answer as a stream of text, all streams read in turns."""
    engine = Engine.for_model(model, num_blocks=load.pool_blocks + 1, block_size=BLOCK_SIZE)
    llm = LLM.for_engine(engine, tokenizer)

    def run(load: Load) -> Pass:
        done = Pass(answers=[[] for _ in load.jobs])
        streams = [
            (llm.stream(prompt, exactly(wanted)), answer)
            for (prompt, wanted), answer in zip(load.jobs, done.answers, strict=True)
        ]
        while streams:
            for stream, answer in list(streams):
                delta = next(stream, None)
                if delta is None:
                    streams.remove((stream, answer))
                else:
                    answer += delta.token_ids
        return done

    return run


class Looking:
    """A runner that calls `look` after each forward pass of another one: before requests finish, so all slots count."""

    fault = ""

    def __init__(self, runner: Runner, look: Callable[[], None]) -> None:
        self.runner, self.look, self.close = runner, look, runner.close
        self.model, self.pool = runner.model, runner.pool

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        logits = self.runner.run(chunks)
        self.look()
        return logits
