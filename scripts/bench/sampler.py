"""Lesson 4. Suite `sampler`: the cost of choosing tokens over Qwen3's vocabulary, by the rows' parameters."""

from scripts.bench.common import Report
from scripts.bench.turns import Timing, take_turns

import torch

from lessons.l4_sampler.row import Row
from mini_engine.engine.sampler import draw, sample, uniform
from mini_engine.engine.sampling_params import SamplingParams

ROWS = 8
VOCAB = 151_936
ASKED = {
    "temperature": {"temperature": 0.8},
    "temperature, top-k 50": {"temperature": 0.8, "top_k": 50},
    "temperature, min-p": {"temperature": 0.8, "min_p": 0.05},
    "temperature, top-p": {"temperature": 0.8, "top_p": 0.9},
    "temperature, repetition penalty": {"temperature": 0.8, "repetition_penalty": 1.1},
}


def sampling(logits, asked: list[dict]):
    """Return a contender that samples one token per row of logits, each with its own parameters."""
    rows = [Row(SamplingParams(seed=0, **params), list(range(500)), list(range(500))) for params in asked]
    return lambda: sample(logits, rows)


def contenders() -> dict:
    """Return the sampler with rows of each kind, and single operations to compare with."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    probs, uniforms = logits.softmax(dim=-1), torch.linspace(0, 0.999, ROWS, dtype=torch.float64)
    greedy = {"temperature": 0}
    found = {
        ("sampler", "all greedy"): sampling(logits, [greedy] * ROWS),
        ("sampler", "one with top-p, others greedy"): sampling(logits, [{"top_p": 0.9}] + [greedy] * (ROWS - 1)),
    }
    found |= {("sampler", f"all with {name}"): sampling(logits, [asked] * ROWS) for name, asked in ASKED.items()}
    return found | {
        ("operation", "argmax"): lambda: logits.argmax(dim=-1),
        ("operation", "sort"): lambda: logits.sort(dim=-1),
        ("operation", "a number for each row"): lambda: [uniform(seed, 1_000) for seed in range(ROWS)],
        ("operation", "draw, one number a row"): lambda: draw(probs, uniforms),
        ("operation", "draw, noise on every token"): lambda: (probs / torch.empty_like(probs).exponential_()).argmax(
            -1
        ),
    }


def run(args) -> Report:
    """Measure milliseconds per batch, for each kind of row and for single operations."""
    timings = take_turns(contenders(), args.rounds or (5 if args.quick else 30), "sampler")
    notes = [f"{ROWS} rows of {VOCAB:,} logits, histories of 1,000 tokens"]
    return Report("sampler", rows_of(timings), notes)


def rows_of(timings: dict[tuple[str, str], Timing]) -> list[dict]:
    """Return a row for each timing."""
    return [{"of": kind, "what": name} | timing.columns() for (kind, name), timing in timings.items()]
