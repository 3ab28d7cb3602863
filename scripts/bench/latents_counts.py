"""Course machinery. For suite `latents`: bytes per token in public models, and how many requests fit.

Layers, heads and sizes: the defaults of transformers 5.23's `LlamaConfig` (Llama 2 7B), `Qwen3NextConfig`,
`DeepseekV3Config` and `MiniCPM3Config`, which are those of the models; config.json of Llama 3 8B and of Qwen3-8B on
huggingface.co; Megatron Bridge's `KimiK2Provider`. Models with windows come from `windows_counts`.
"""

from dataclasses import dataclass
from typing import Any

from scripts.bench import windows_counts
from scripts.bench.behind import add_requests, without_model
from scripts.bench.windows_counts import GIB, sequence_bytes

from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.manager import KvCacheManager

ITEM = 2  # bytes of a number in bfloat16
BLOCK_SIZE, CHUNK, ANSWER = 16, 512, 1024


@dataclass(frozen=True)
class Model:
    """A model's memory. numbers: per token, in each of `layers`. state_bytes: per request, whatever its length."""

    name: str
    kind: str
    layers: int
    numbers: int
    state_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one more token."""
        return self.layers * self.numbers * ITEM

    def bytes_of(self, length: int) -> int:
        """Return the bytes of one sequence."""
        return length * self.token_bytes + self.state_bytes


def heads(name: str, kind: str, layers: int, kv_heads: int, head_dim: int, state_bytes: int = 0) -> Model:
    """Return a model with a key and a value for each K/V head."""
    return Model(name, kind, layers, 2 * kv_heads * head_dim, state_bytes)


def latents(name: str, layers: int, rank: int, rope: int) -> Model:
    """Return a model with a latent and a rotary key."""
    return Model(name, "latents", layers, rank + rope)


def expanded(name: str, layers: int, num_heads: int, nope: int, rope: int, v: int) -> Model:
    """Return the same model with expanded latents: a key and a value for each head."""
    return Model(f"{name}, expanded", "heads", layers, num_heads * (nope + rope + v))


# 36 delta-net layers: 32 heads of 128 × 128 in float32, and 3 inputs of a convolution over 2 · 16 · 128 + 32 · 128
NEXT_STATE = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * ITEM)
DEEPSEEK = latents("DeepSeek-V3", 61, 512, 64)
LLAMA_2, LLAMA_3 = heads("Llama 2 7B", "heads", 32, 32, 128), heads("Llama 3 8B", "grouped heads", 32, 8, 128)
QWEN, MINICPM = heads("Qwen3-8B", "grouped heads", 36, 8, 128), latents("MiniCPM3-4B", 62, 256, 32)
MODELS = (
    LLAMA_2,
    LLAMA_3,
    QWEN,
    heads("Qwen3-Next 80B", "hybrid", 12, 2, 256, NEXT_STATE),
    expanded("DeepSeek-V3", 61, 128, 128, 64, 128),
    DEEPSEEK,
    latents("Kimi K2", 61, 512, 64),
    MINICPM,
)
WINDOWED = [shape for shape in windows_counts.MODELS if shape.name in ("Gemma 3 27B", "gpt-oss-20b")]
POCKETS = heads("pocket", "grouped heads", 6, 2, 64), latents("pocket-latent", 6, 64, 32)


def model_rows(length: int) -> list[dict[str, Any]]:
    """Return, for each public model, the bytes of a token: those of one long sequence, divided by its length."""
    totals = [(model.name, model.kind, model.layers, model.bytes_of(length)) for model in MODELS]
    totals += [(shape.name, "windows", shape.num_layers, sequence_bytes(shape, length)) for shape in WINDOWED]
    return [
        {
            "case": name,
            "kind": kind,
            "KV layers": layers,
            "KiB a token": total / length / 1024,
            f"GiB for {length} tokens": total / GIB,
        }
        for name, kind, layers, total in sorted(totals, key=lambda row: -row[-1])
    ]


# ---------------------------------------------------------------- requests


def request_rows(quick: bool) -> list[dict[str, Any]]:
    """Return the number of requests that decode at once in pools of the same size, by bytes per token."""
    lengths = (1024,) if quick else (1024, 4096)
    cases = [(POCKETS, 2**24, 256)] + [((LLAMA_2, QWEN, MINICPM, DEEPSEEK), 16 * GIB, length) for length in lengths]
    return [
        {
            "case": model.name,
            "pool MiB": size // 2**20,
            "prompts of": length,
            "bytes a token": model.token_bytes,
            "at once": at_once(model, size, length),
        }
        for models, size, length in cases
        for model in models
    ]


def at_once(model: Model, num_bytes: int, length: int) -> int:
    """Give lesson 5's scheduler more requests than fit. Return the most that it runs in one step."""
    manager = KvCacheManager(num_bytes // (BLOCK_SIZE * model.token_bytes), BLOCK_SIZE)
    limits = SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=2048, chunked_prefill_size=CHUNK)
    scheduler = Scheduler(manager, limits)
    count = num_bytes // (model.token_bytes * length) + 8
    add_requests(scheduler, [(length, ANSWER)] * count)
    most = 0
    for _ in without_model(scheduler):
        most = max(most, len(scheduler.running))
        if not scheduler.waiting:
            break
    return most
