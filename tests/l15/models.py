"""Lesson 15. Shared by the tests: random checkpoints with windows, and Hugging Face's answers to compare with."""

import functools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from mini_engine.assembly.build import build_engine
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.qwen3 import FAMILY as QWEN3
from tests.support import BASE as DENSE
from tests.support import hf_greedy

NEW = 12
FULL, SLIDING = "full_attention", "sliding_attention"
BASE = DENSE | dict(use_sliding_window=True)
# which layers have windows, and W: no multiple of a block, smaller than one, larger than most prompts
FAMILIES = {"SSFS": 7, "FS": 2, "SF": 16, "SSS": 23, "FFSF": 5, "SFSSF": 64}
_KEEPERS: list[tempfile.TemporaryDirectory] = []


def types(letters: str) -> list[str]:
    return [{"F": FULL, "S": SLIDING}[letter] for letter in letters]


@functools.cache
def checkpoint(letters: str, window: int) -> Path:
    """Return a random checkpoint with these layers, written once per run."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = dict(num_hidden_layers=len(letters), layer_types=types(letters), sliding_window=window)
    keeper = tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True)
    Qwen3ForCausalLM(Qwen3Config(**BASE | shape)).save_pretrained(keeper.name)
    _KEEPERS.append(keeper)  # removed when the test process ends
    return Path(keeper.name)


@functools.cache
def hugging_face(letters: str, window: int):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint(letters, window), dtype=torch.float32).eval()


@functools.cache
def greedy(letters: str, window: int, prompt: tuple[int, ...], max_new_tokens: int = NEW) -> list[int]:
    """Return Hugging Face's answer to a prompt on its own; each is computed once per run."""
    return hf_greedy(hugging_face(letters, window), list(prompt), max_new_tokens)


def engine_of(
    letters: str, window: int, chunk: int = 512, budget: int = 512, max_num_seqs: int = 8, **options
) -> Engine:
    """Return an engine over a random model: blocks of 8 tokens."""
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max(budget, max_num_seqs), chunked_prefill_size=chunk
    )
    defaults = dict(num_blocks=600, block_size=8, kernel="torch", backend="reference")
    return build_engine(QWEN3.load(checkpoint(letters, window)), scheduler_config=limits, **defaults | options)


def ask(engine: Engine, prompts: Iterable[Sequence[int]], max_new_tokens: int = NEW, name: str = "r") -> list[Request]:
    """Add a request for every prompt, greedy; the caller runs the steps."""
    params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
    return [engine.add_request(f"{name}{i}", list(ids), params) for i, ids in enumerate(prompts)]


def drain(engine: Engine) -> None:
    """Run steps until every request has ended."""
    while engine.has_unfinished:
        engine.step()


def check_nothing_is_lost(engine: Engine) -> None:
    """Check that nothing is held by a request that has ended, and that all blocks can be had again."""
    manager = engine.scheduler.manager
    memory = manager.coordinator.memory
    assert not memory.holds and manager.blocks_by_state.held == 0, "blocks leaked"
    manager.coordinator.clear()
    assert manager.allocator.num_free == manager.num_usable_blocks, "the tree's companions leaked"
