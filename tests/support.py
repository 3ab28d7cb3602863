"""Course machinery. Random Qwen3 checkpoints, written by transformers, and references to compare with.

transformers is imported by what needs it: it takes seconds, and most tests of a lesson do without.
"""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.families.qwen3 import load_model
from mini_engine.model.causal_lm import CausalLM
from mini_engine.model.qwen3 import qwen3_model

# Each family varies one thing: query heads per key head, head_dim, tied or untied head, biases, odd sizes.
FAMILIES = {
    "one query a key head, untied": dict(num_attention_heads=4, num_key_value_heads=4, head_dim=16),
    "two, tied, wide heads": dict(num_key_value_heads=2, head_dim=40, tie_word_embeddings=True),
    "four, with biases": dict(num_attention_heads=8, attention_bias=True, head_dim=32),
    "eight, odd sizes": dict(
        num_attention_heads=8, num_key_value_heads=1, head_dim=18, hidden_size=50, intermediate_size=77, vocab_size=131
    ),
}
BASE = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    initializer_range=0.2,  # wide logit gaps; with the usual 0.02, rounding could decide the token
    tie_word_embeddings=False,
)


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normally distributed numbers, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# For pools and caches that no model fills: three layers of two heads of eight numbers.
SMALL = Qwen3Config(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def small_rows(count: int, seed: int = 0) -> torch.Tensor:
    """Return keys or values of so many tokens for a layer of SMALL."""
    return some(count, 2, 8, seed=seed)


def random_model(seed: int = 0, **changes) -> CausalLM:
    """Return a random Qwen3 of ours, with the weights' names that a checkpoint has; made without transformers."""
    sizes = BASE | changes
    spread = sizes.pop("initializer_range")
    return with_random_weights(qwen3_model(Qwen3Config(**sizes)), spread, seed)


def with_random_weights(model: CausalLM, spread: float = 0.2, seed: int = 0) -> CausalLM:
    """Return a model of ours, which may be of any family, after drawing its weights."""
    model, generator = model.eval().requires_grad_(False), torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, spread, generator=generator)
    return model


def write_checkpoint(
    directory: Path,
    seed: int = 0,
    shard_size: str = "5GB",
    architecture: str = "Qwen3",
    base: dict[str, Any] = BASE,
    **changes,
) -> Path:
    """Write a random model to `directory` with transformers, with non-trivial biases and norm weights."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(**base | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return directory


@functools.cache
def checkpoint(family: str) -> Path:
    """Return the checkpoint of one family, written once per run."""
    return write_checkpoint(new_folder(), **FAMILIES[family])


def new_folder() -> Path:
    """Return a new folder, which is removed when the test process ends."""
    keeper = tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True)
    _KEEPERS.append(keeper)
    return Path(keeper.name)


_KEEPERS: list[tempfile.TemporaryDirectory] = []


@functools.cache
def both(family: str):
    """Return (our model, Hugging Face's) in float32 on the CPU, from the same checkpoint."""
    return load_model(checkpoint(family)), hugging_face(checkpoint(family))


@functools.cache
def hugging_face(directory: Path, dtype: Any = "float32") -> Any:
    """Return Hugging Face's model of a checkpoint, on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def thorough(full: int, few: int) -> int:
    """Return how many examples a long test tries: `full`, or `few` in a student's check, which should be quick."""
    return few if "KV_COURSE_QUICK" in os.environ else full


def some_ids(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Return `length` token ids, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@contextmanager
def must_raise(kind: type[Exception], teach: str) -> Iterator[pytest.ExceptionInfo]:
    """Expect the body to raise an error of this kind, whatever its message; if it does not, fail with `teach`.

    Yields an object whose `value` is the error afterwards. An unwritten task's error is never the expected one.
    """
    try:
        with pytest.raises(kind) as caught:
            yield caught
    except BaseException as error:
        error.add_note(teach)
        raise
    if isinstance(caught.value, NotImplementedError):
        raise caught.value


@contextmanager
def refused(kind: type[Exception], values: str = "") -> Iterator[pytest.ExceptionInfo]:
    """Expect the body to raise an error of this kind, in one line that has these values, separated by spaces.

    Values are the numbers and names that a user needs; the sentence around them is free.
    """
    with pytest.raises(kind) as caught:
        yield caught
    said = str(caught.value)
    assert "\n" not in said, "an error is one sentence on one line"
    assert not (missing := [value for value in values.split() if value not in said]), f"{said!r} lacks {missing}"


def ran(main: Callable[..., Any], *arguments: Any, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, str]:
    """Run a command in this process: its exit code, and what it prints on stdout and on stderr."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


class OneOf:
    """Equals each of a few values: `assert status == OneOf(400, 413)`."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return other in self.values

    def __repr__(self) -> str:
        return " or ".join(map(repr, self.values))


def hf_greedy(hf_model, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """Return Hugging Face's greedy continuation of one prompt, without batching; computed once per run."""
    return list(_hf_greedy(hf_model, tuple(prompt_ids), max_new_tokens))


@functools.cache
def _hf_greedy(hf_model, prompt_ids: tuple[int, ...], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = hf_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
    return out[0, len(prompt_ids) :].tolist()


def first_difference(got: Sequence[int], want: Sequence[int]) -> int:
    """Return the place of the first token that differs, or the end of the shorter answer."""
    return next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))


def small_engine(model: Any, chunk: int = 512, budget: int = 512, max_num_seqs: int = 8, **options: Any) -> Any:
    """Return an engine over a random model, with lesson 0's layers and blocks of 8 tokens."""
    from mini_engine.assembly.build import build_engine
    from mini_engine.engine.scheduler_config import SchedulerConfig

    limits = SchedulerConfig(max_num_seqs, max(budget, max_num_seqs), chunk)
    defaults = dict(block_size=8, kernel="torch", backend="reference", scheduler_config=limits)
    return build_engine(model, **defaults | options)


def ask(
    engine: Any, prompts: Iterable[Sequence[int]], max_tokens: int = 10, name: str = "r", **params: Any
) -> list[Any]:
    """Add a greedy request for every prompt; the caller runs the steps."""
    from mini_engine.engine.sampling_params import SamplingParams

    chosen = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
    return [engine.add_request(f"{name}{number}", list(ids), chosen) for number, ids in enumerate(prompts)]


def drain(engine: Any) -> None:
    """Run steps until every request has ended."""
    while engine.has_unfinished:
        engine.step()


def check_answers(requests: Sequence[Any], directory: Path, when: str) -> list[int]:
    """Check that the answers are Hugging Face's of this checkpoint; return how many prompt tokens each found."""
    for request in requests:
        assert not request.error, f"{when}: {request.error}"
        want = hf_greedy(hugging_face(directory), request.prompt_ids, request.params.max_tokens)
        got, num_tokens = request.output_ids, len(request.prompt_ids)
        assert got == want, (
            f"{when}: {num_tokens} prompt tokens, {request.num_cached_tokens} cached, {request.num_preemptions} "
            f"preemptions: the first token that is not Hugging Face's is number {first_difference(got, want)}"
        )
    return [request.num_cached_tokens for request in requests]


def store_of(engine: Any) -> Any:
    """Return the tiers' store of an engine."""
    return engine.scheduler.manager.coordinator.connector.block_store


def check_no_block_is_lost(engine: Any) -> None:
    """Check that nothing is held by a request that has ended, and that all blocks can be had again."""
    manager = engine.scheduler.manager
    assert not manager.tables and manager.blocks_by_state.held == 0, "blocks leaked"
    assert not getattr(manager.coordinator.memory, "holds", None), "a request has ended and still holds something"
    manager.coordinator.clear()
    assert manager.allocator.num_free == manager.num_usable_blocks, "with no request and no tree, all blocks are free"


def oracle(q, k, v) -> torch.Tensor:
    """Compute causal attention of one sequence in float64 with loops: query i sees keys 0 … kv_len - q_len + i."""
    q, k, v = q.double(), k.double(), v.double()
    (q_len, heads, dim), (kv_len, kv_heads, _) = q.shape, k.shape
    out = torch.empty(q_len, heads, v.shape[-1], dtype=torch.float64)
    for i in range(q_len):
        seen = kv_len - q_len + i + 1
        for h in range(heads):
            g = h // (heads // kv_heads)
            weights = torch.softmax(k[:seen, g] @ q[i, h] * dim**-0.5, dim=0)
            out[i, h] = weights @ v[:seen, g]
    return out


def forget_builds(*libraries: Any) -> None:
    """Make this process one that has not asked for these compiled libraries (`native_build.Library`) yet."""
    for library in libraries:
        for name in ("_built", "_known"):
            vars(library).pop(name, None)


def imported_by(*arguments: str) -> set[str]:
    """Return the modules in memory after the command `mini-engine` has run with these, in a process of its own."""
    program = (
        "import sys\nfrom mini_engine.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=120)
    return set(done.stderr.split())
