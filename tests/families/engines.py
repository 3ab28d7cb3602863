"""Course machinery. Shared by the conformance suite: engines over a row's model, and what their answers must be.

Tokens must be Hugging Face's. It need not generate them: it reads prompt and answer at once, and each token of the
answer must be its choice behind those before it. int8 and int4 have no other implementation, so the answer to a prompt
alone, uncached, by the reference kernel, decides; test_formats.py says how good it is.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.loading import load
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.hybrid.memory import StateMemory
from mini_engine.kv.memories import Memories
from mini_engine.model.causal_lm import CausalLM
from mini_engine.windows.memory import WindowMemory
from tests.families.rows import BLOCK, INTERVAL, Model
from tests.support import hugging_face, some_ids

NEW = 10  # tokens of an answer: more than a block
VOCAB = 130  # every shape has so many tokens
TIERS: dict[str, Any] = {"kv_host_bytes": 2**28, "kv_always": True}
UNCACHED: dict[str, Any] = {"enable_prefix_caching": False}
OPTIONS: dict[str, Any] = dict(
    num_blocks=600, block_size=BLOCK, kernel="torch", checkpoint_interval=INTERVAL, max_track_slots=60
)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(some_ids(length, VOCAB, seed=seed or length + 100))  # of 9 tokens, 9 leaves two choices level in int4


def prompts_of(model: Model) -> list[tuple[int, ...]]:
    """Return prompts around the ends of blocks and of what the row straddles, the longest of several of both."""
    at = min(model.straddle, len(LONG) - 2)
    return [prompt_of(length) for length in sorted({1, 9, max(1, at - 1), at, at + 1, 33, len(LONG)})]


LONG = prompt_of(75)


def whole(prompts: Iterable[Sequence[int]]) -> list[int]:
    """Return how many tokens of each prompt are found when it comes again: all but its last block's."""
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]


# ---------------------------------------------------------------- engines


@functools.cache
def loaded(model: Model) -> CausalLM:
    """Return our model, which no test may change."""
    return load(model.path, "float32", "cpu")


def limits_of(chunk: int = 64, budget: int = 64, max_num_seqs: int = 8, **limits: Any) -> SchedulerConfig:
    """Return limits of a step, by default of one in which prompts are cut in chunks of 64."""
    budget = max(budget, chunk, max_num_seqs)
    chosen: Any = {"watermark": 0.0} | limits
    return SchedulerConfig(max_num_seqs, budget, chunk, **chosen)


def engine_of(
    model: Model, limits: SchedulerConfig | None = None, backend: str = "reference", **options: Any
) -> Engine:
    """Return an engine. What was never written is NaN, as far as it is a number that can be."""
    over = loaded(model) if backend == "reference" else load(model.path, "float32", "cpu")  # others take the weights
    chosen = OPTIONS | {"kv_dtype": model.kv_dtype, "scheduler_config": limits or limits_of()} | options
    engine = build_engine(over, backend=backend, **chosen)
    poison(engine)
    return engine


def pools_of(engine: Engine) -> tuple[Any, Any]:
    """Return the pool of K and V, and that of states or None."""
    pool = engine.runner.pool
    states = getattr(pool, "states", None)
    while hasattr(pool, "kv"):
        pool = pool.kv
    return pool, states


def poison(engine: Engine, blocks: Any = slice(None)) -> None:
    """Fill blocks of the pool with NaN: the null block alone, or all. With all, the state slots as well."""
    pool, states = pools_of(engine)
    for layer in (*pool.K, *pool.V):
        if layer.is_floating_point():
            layer[blocks] = float("nan")
    if states is not None and blocks == slice(None):
        for tensor in (states.recurrent_state, states.conv_state):
            tensor.fill_(float("nan"))


def ask(
    engine: Engine, prompts: Iterable[Sequence[int]], num_tokens: int = NEW, name: str = "r", **params: Any
) -> list[Request]:
    """Add a greedy request for each prompt; the caller runs the steps."""
    chosen = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **params)
    return [engine.add_request(f"{name} {number}", list(ids), chosen) for number, ids in enumerate(prompts)]


def drain(engine: Engine, between: Callable[[], object] = lambda: None) -> None:
    """Run steps until every request has ended."""
    while engine.has_unfinished:
        engine.step()
        between()


def answered(
    engine: Engine,
    model: Model,
    when: str,
    prompts: Sequence[Sequence[int]] | None = None,
    num_tokens: int = NEW,
    between: Callable[[], object] = lambda: None,
) -> list[int]:
    """Ask, run and check; return how many tokens of each prompt were found."""
    requests = ask(engine, prompts_of(model) if prompts is None else prompts, num_tokens, when)
    drain(engine, between)
    return check(model, requests, when)


# ---------------------------------------------------------------- what must be

_RIGHT: dict[tuple[Model, tuple[int, ...]], list[int]] = {}  # the longest answers that were found right so far


@torch.inference_mode()
def hf_logits(model: Model, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return Hugging Face's logits behind each token of texts, `[len(text), vocab]` each."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])  # no token sees the zeros
    rows = hugging_face(model.path)(ids, use_cache=False).logits
    return [row[: len(text)] for row, text in zip(rows, texts, strict=True)]


def behind(model: Model, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Return how much less likely than its own choices full precision finds these answers to prompts, in nats."""
    found = []
    for (prompt, answer), logits in zip(answers, hf_logits(model, [[*p, *a] for p, a in answers]), strict=True):
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        found.append(rows.amax(1) - rows.gather(1, torch.tensor(answer)[:, None])[:, 0])
    return torch.cat(found).mean().item()


def choices(model: Model, requests: Sequence[Request]) -> list[list[int]]:
    """Return for each token of the answers what Hugging Face would say in its place."""
    texts = [[*request.prompt_ids, *request.output_ids] for request in requests]
    return [
        logits[len(request.prompt_ids) - 1 : -1].argmax(1).tolist()
        for request, logits in zip(requests, hf_logits(model, texts), strict=True)
    ]


def check(model: Model, requests: Sequence[Request], when: str) -> list[int]:
    """Compare answers; return how many tokens of each prompt were found in the cache."""
    for request in requests:
        assert not request.error, f"{when}: {request.error}"
    unknown = [one for one in requests if len(known(model, one.prompt_ids)) < len(one.output_ids)]
    if unknown and model.is_exact:
        for request, chosen in zip(unknown, choices(model, unknown), strict=True):
            compare(request, chosen, when)
            _RIGHT[model, tuple(request.prompt_ids)] = list(request.output_ids)
    for request in requests:
        compare(request, right(model, request.prompt_ids, len(request.output_ids)), when)
        assert len(request.output_ids) == request.params.max_tokens, f"{when}: the answer ends early"
    return [request.num_cached_tokens for request in requests]


def compare(request: Request, want: list[int], when: str) -> None:
    got = request.output_ids
    first = next((at for at, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
    assert first is None, (
        f"{when}: {len(request.prompt_ids)} prompt tokens, {request.num_cached_tokens} cached, "
        f"{request.num_preemptions} preemptions: token {first} of the answer is {got[first]} instead of {want[first]}"
    )


def known(model: Model, prompt: Iterable[int]) -> list[int]:
    return _RIGHT.get((model, tuple(prompt)), [])


def right(model: Model, prompt: Sequence[int], num_tokens: int = NEW) -> list[int]:
    """Return the right answer to a prompt on its own, each computed once per run."""
    if len(known(model, prompt)) < num_tokens:
        engine = engine_of(model, kernel="reference", **UNCACHED)
        requests = ask(engine, [prompt], num_tokens)
        drain(engine)
        if model.is_exact:
            check(model, requests, "alone")
        _RIGHT[model, tuple(prompt)] = requests[0].output_ids
    return known(model, prompt)[:num_tokens]


# ---------------------------------------------------------------- what must have happened, and be given back


def memories_of(engine: Engine) -> list[Any]:
    """Return the engine's memories beside K and V: of states, of windows, of both, or none."""
    coordinator: Any = engine.scheduler.manager.coordinator
    memory = getattr(coordinator, "memory", None)
    memories = memory.memories if isinstance(memory, Memories) else [memory]
    return [one for one in memories if isinstance(one, StateMemory | WindowMemory)]


def tree_of(engine: Engine) -> Any:
    coordinator: Any = engine.scheduler.manager.coordinator
    return coordinator.prefixes.tree


def forget(engine: Engine) -> None:
    """Drop all that the engine's tree has; tiers keep theirs."""
    coordinator: Any = engine.scheduler.manager.coordinator
    coordinator.clear()


def check_nothing_is_lost(engine: Engine) -> None:
    """Check that nothing is held by a request that has ended, and that all can be had again."""
    manager = engine.scheduler.manager
    assert not manager.tables and manager.blocks_by_state.held == 0, "blocks are lost"
    for memory in memories_of(engine):
        assert not memory.holds
        if isinstance(memory, StateMemory):
            states: Any = memory.states
            assert sorted(memory.free_slots) == list(range(1, states.max_reqs + 1)), "working slots are lost"
            assert set(memory.checkpoints.slots.values()) == states.held_track_slots, "a checkpoint is no node's"
    forget(engine) if hasattr(manager.coordinator, "clear") else None
    assert manager.allocator.num_free == manager.num_usable_blocks, "blocks leave with the tree that are not free"
