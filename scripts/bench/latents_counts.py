"""Course machinery. For suite `latents`: bytes per token in public models, and how many requests fit.

The models are those of lessons/models.toml, and two that no engine has to run: Llama 2 7B, whose layers and heads are
the defaults of transformers' `LlamaConfig`, and DeepSeek-V3 if it kept a key and a value for each head.
"""

from typing import Any, NamedTuple

from scripts.bench.behind import add_requests, without_model
from scripts.bench.windows_counts import GIB
from scripts.pages.models import models

from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.manager import KvCacheManager

BLOCK_SIZE, CHUNK, ANSWER = 16, 512, 1024
KINDS = {"full": "grouped heads", "window": "windows", "state": "hybrid", "latent": "latents"}
SHOWN = ("Llama 3.1 8B", "Qwen3-8B", "Qwen3-Next 80B", "Gemma 3 27B", "gpt-oss-20b")
SHOWN += ("DeepSeek-V3", "Kimi K2", "MiniCPM3-4B")


class Kept(NamedTuple):
    """What a model keeps in bfloat16. layers: that keep K and V or latents. token_bytes: in all of them."""

    name: str
    kind: str
    layers: int
    token_bytes: int


LLAMA_2 = Kept("Llama 2 7B", "heads", 32, 32 * 2 * 32 * 128 * 2)
EXPANDED = Kept("DeepSeek-V3, expanded", "heads", 61, 61 * 128 * (128 + 64 + 128) * 2)
POCKETS = (
    Kept("pocket", "grouped heads", 6, 6 * 2 * 2 * 64 * 2),
    Kept("pocket-latent", "latents", 6, 6 * (64 + 32) * 2),
)


def published(length: int) -> list[Kept]:
    """Return the models of models.toml; a token's bytes are those of one sequence, divided by its length."""
    found = []
    for model in models():
        if model.name in SHOWN:
            layers = sum(cost.layers for cost in model.costs.by_kind() if cost.kind != "state")
            size = model.costs.request_bytes(length)
            found.append(Kept(model.name, KINDS[model.kind], layers, size // length))
    return found


def model_rows(length: int) -> list[dict[str, Any]]:
    """Return the bytes of a token in each public model, the most first."""
    found = sorted([LLAMA_2, EXPANDED, *published(length)], key=lambda kept: -kept.token_bytes)
    return [
        {
            "case": kept.name,
            "kind": kept.kind,
            "KV layers": kept.layers,
            "KiB a token": kept.token_bytes / 1024,
            f"GiB for {length} tokens": kept.token_bytes * length / GIB,
        }
        for kept in found
    ]


# ---------------------------------------------------------------- requests


def request_rows(quick: bool) -> list[dict[str, Any]]:
    """Return the number of requests that decode at once in pools of the same size, by bytes per token."""
    known = {kept.name: kept for kept in published(BLOCK_SIZE)}
    large = (LLAMA_2, *(known[name] for name in ("Qwen3-8B", "MiniCPM3-4B", "DeepSeek-V3")))
    cases = [(POCKETS, 2**24, 256), *((large, 16 * GIB, length) for length in ((1024,) if quick else (1024, 4096)))]
    return [
        {
            "case": kept.name,
            "pool MiB": size // 2**20,
            "prompts of": length,
            "bytes a token": kept.token_bytes,
            "at once": at_once(kept.token_bytes, size, length),
        }
        for some, size, length in cases
        for kept in some
    ]


def at_once(token_bytes: int, num_bytes: int, length: int) -> int:
    """Give lesson 5's scheduler more requests than fit. Return the most that it runs in one step."""
    manager = KvCacheManager(num_bytes // (BLOCK_SIZE * token_bytes), BLOCK_SIZE)
    limits = SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=2048, chunked_prefill_size=CHUNK)
    scheduler = Scheduler(manager, limits)
    add_requests(scheduler, [(length, ANSWER)] * (num_bytes // (token_bytes * length) + 8))
    most = 0
    for _ in without_model(scheduler):
        most = max(most, len(scheduler.running))
        if not scheduler.waiting:
            break
    return most
