"""Course machinery. Parts `answers` and `methods` of suite `kv_dtype`: choices and KL, by method and by bits.

Numbers are rounded and then stored in full precision, so that any method can be tried; `mini_engine/quantized` packs
the engine's own formats. Each group of numbers gets 2^bits levels between its least and its largest number.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scripts.bench.kv_quality import BLOCK_SIZE, RANDOM, heavy_tailed, logits_of, pools
from scripts.pocket.prompts import COURSE_PROMPTS

import torch
from torch import Tensor

from lessons.l17_bits.judge import kl
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine
from mini_engine.engine.offline import generate_all
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.block_tensor import KvPool
from mini_engine.model.causal_lm import CausalLM
from mini_engine.pocket import POCKET_DIR
from mini_engine.quantized.rotation import rotate
from mini_engine.text.tokenizer import Tokenizer

BITS = (2, 3, 4, 5, 6, 8)
SEEDS = (0, 1, 2)
GROUP = 32  # numbers that share a step
RUN = 16  # tokens that share a channel's step
Rounding = Callable[[Tensor, int], Tensor]


def rounded(x: Tensor, bits: int, group: int = 0) -> Tensor:
    """Return x `[..., D]` with every `group` numbers (0: all D) rounded to evenly spaced levels, in x's dtype."""
    groups = x.unflatten(-1, (-1, group or x.shape[-1]))
    least, largest = groups.aminmax(dim=-1, keepdim=True)
    step = ((largest - least) / (2**bits - 1)).half().to(x.dtype).clamp_min(torch.finfo(torch.float16).tiny)
    least = least.half().to(x.dtype)
    return (((groups - least) / step).round().clamp(0, 2**bits - 1) * step + least).flatten(-2)


def by_channel(x: Tensor, bits: int) -> Tensor:
    """Return x `[T, H, D]` with each channel rounded over runs of 16 tokens, as KIVI does with keys."""
    runs = [rounded(run.movedim(0, -1), bits).movedim(-1, 0) for run in x.split(RUN)]
    return torch.cat(runs)


def turned(x: Tensor, bits: int, group: int = 0) -> Tensor:
    """Return x `[..., D]` rotated, rounded and rotated back: the rotation is its own inverse."""
    return rotate(rounded(rotate(x), bits, group))


class Method(NamedTuple):
    """A rounding of keys and of values, and how many numbers share a step and a least number: two float16."""

    of_k: Rounding
    of_v: Rounding
    share_k: int
    share_v: int

    def stored(self, bits: int) -> float:
        """Return the bits stored per number, its share of step and least number included."""
        return bits + fmean((32 / self.share_k, 32 / self.share_v))


VECTOR = RANDOM.head_dim
rounded_groups, turned_groups = (partial(way, group=GROUP) for way in (rounded, turned))
METHODS = {
    "plain": Method(rounded, rounded, VECTOR, VECTOR),
    f"plain, groups of {GROUP}": Method(rounded_groups, rounded_groups, GROUP, GROUP),
    "keys by channel": Method(by_channel, rounded, RUN, VECTOR),
    "rotated": Method(turned, turned, VECTOR, VECTOR),
    f"rotated, groups of {GROUP}": Method(turned_groups, turned_groups, GROUP, GROUP),
}


class RoundingPool(KvPool):
    """Lesson 3's pool with numbers that were rounded first."""

    direct = False
    bits: int
    method: Method

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Write as in lesson 3, rounded first."""
        method = self.method
        super().set_kv(layer, slot_mapping, method.of_k(k, self.bits), method.of_v(v, self.bits))


def method_rows() -> list[dict[str, Any]]:
    """Measure KL of the random model with an outlier channel: each method and number of bits, on each seed."""
    return [
        {"what": name, "bits": bits, "bits stored": method.stored(bits)}
        | {f"KL, seed {seed}": kl_of(method, bits, seed) for seed in SEEDS}
        for name, method in METHODS.items()
        for bits in BITS
    ]


def kl_of(method: Method, bits: int, seed: int) -> float:
    """Return the mean KL over the texts of one random model."""
    model, texts = heavy_tailed(seed)
    num_blocks = 1 + sum(-(-len(ids) // BLOCK_SIZE) for ids in texts)
    kernel = load_kernel("torch", model.device, model.dtype)
    full = KvPool(model.config, num_blocks, BLOCK_SIZE, kernel, model.dtype)
    pool = RoundingPool(model.config, num_blocks, BLOCK_SIZE, kernel, model.dtype)
    pool.bits, pool.method = bits, method
    return float(kl(logits_of(model, texts, full), logits_of(model, texts, pool)).mean())


def answer_rows() -> list[dict[str, Any]]:
    """Count after how many tokens of the pocket model's answers, and of the random model's texts, a choice changes."""
    cases = {"pocket, its answers": course_answers(), "random, its own": heavy_tailed()}
    rows = []
    for name, (model, texts) in cases.items():
        num_blocks = 1 + sum(-(-len(ids) // BLOCK_SIZE) for ids in texts)
        found = {kind: logits_of(model, texts, pool) for kind, pool in pools(model, num_blocks).items()}
        full = found.pop("full")
        for kind, other in found.items():
            changed = int((other.argmax(-1) != full.argmax(-1)).sum())
            rows.append(
                {
                    "what": f"{name}: {kind}",
                    "tokens": len(full),
                    "other choice": changed,
                    "KL": float(kl(full, other).mean()),
                }
            )
    return rows


def course_answers() -> tuple[CausalLM, list[list[int]]]:
    """Return the pocket model, and the course's prompts with its own greedy answers."""
    tokenizer, model = Tokenizer.load(POCKET_DIR), load_model(POCKET_DIR)
    engine = Engine.for_model(model, kv_bytes=2**24, kernel="torch")
    prompts = [tokenizer.encode(prompt) for prompt in COURSE_PROMPTS]
    done = generate_all(engine, prompts, SamplingParams(temperature=0, max_tokens=32), progress=False)
    return model, [ids + one.token_ids for ids, one in zip(prompts, done, strict=True)]


def draw_methods(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw KL against bits, a line for each method: the mean of all seeds."""
    from scripts.bench.plot import SERIES, canvas

    words = (
        "KL by the bits stored: rotated lies lowest, keys by channel above it, plain highest, at every number of bits"
    )
    with canvas(path, 6.4, 3.8, words) as figure:
        axes = figure.add_subplot()
        for color, name in zip(SERIES, METHODS, strict=False):
            points = [row for row in rows if row["what"] == name]
            means = [fmean(row[f"KL, seed {seed}"] for seed in SEEDS) for row in points]
            axes.plot([row["bits stored"] for row in points], means, marker="o", markersize=4, color=color, label=name)
        axes.set_yscale("log")
        axes.set_xlabel("bits stored for a number, step and least included")
        axes.set_ylabel("KL, nats")
        axes.grid(axis="y", linewidth=0.5)
        axes.legend(fontsize=9)
        figure.tight_layout()
