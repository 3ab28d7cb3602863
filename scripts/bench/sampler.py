"""Lesson 4. Suite `sampler`: the cost of choosing tokens over Qwen3's vocabulary, by the rows' parameters."""

from scripts.bench.common import Report, Timing, take_turns

from mini_engine.cli.parser import whole_number

VOCAB = 151_936
ASKED = {
    "temperature": {"temperature": 0.8},
    "temperature, top-k 50": {"temperature": 0.8, "top_k": 50},
    "temperature, min-p": {"temperature": 0.8, "min_p": 0.05},
    "temperature, top-p": {"temperature": 0.8, "top_p": 0.9},
    "temperature, repetition penalty": {"temperature": 0.8, "repetition_penalty": 1.1},
}


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--rows", type=whole_number(2), default=8, metavar="N", help="rows in a batch (default: 8)")


def sampling(logits, asked: list[dict]):
    """Return a contender that samples one token per row of logits, each with its own parameters."""
    from mini_engine.engine.sampler import sample
    from mini_engine.engine.sampling_params import Row, SamplingParams

    rows = [Row(SamplingParams(seed=0, **params), list(range(500)), list(range(500))) for params in asked]
    return lambda: sample(logits, rows)


def contenders(count: int) -> dict:
    """Return the sampler with rows of each kind, and single operations to compare with."""
    import torch

    from mini_engine.engine.sampler import draw, uniform

    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(0))
    probs, uniforms = logits.softmax(dim=-1), torch.linspace(0, 0.999, count, dtype=torch.float64)
    greedy = {"temperature": 0}
    found = {
        ("sampler", "all greedy"): sampling(logits, [greedy] * count),
        ("sampler", "one with top-p, others greedy"): sampling(logits, [{"top_p": 0.9}] + [greedy] * (count - 1)),
    }
    found |= {("sampler", f"all with {name}"): sampling(logits, [asked] * count) for name, asked in ASKED.items()}
    return found | {
        ("operation", "argmax"): lambda: logits.argmax(dim=-1),
        ("operation", "sort"): lambda: logits.sort(dim=-1),
        ("operation", "a number for each row"): lambda: [uniform(seed, 1_000) for seed in range(count)],
        ("operation", "draw, one number a row"): lambda: draw(probs, uniforms),
        ("operation", "draw, noise on every token"): lambda: (probs / torch.empty_like(probs).exponential_()).argmax(
            -1
        ),
    }


def run(args) -> Report:
    """Measure milliseconds per batch, for each kind of row and for single operations."""
    timings = take_turns(contenders(args.rows), args.rounds or (5 if args.quick else 30), "sampler")
    notes = [f"{args.rows} rows of {VOCAB:,} logits, histories of 1,000 tokens"]
    return Report("sampler", [row(kind, name, timing) for (kind, name), timing in timings.items()], notes, drawn="ms")


def row(kind: str, name: str, timing: Timing) -> dict:
    return {"of": kind, "what": name, "ms": timing.median * 1e3, "best": timing.best * 1e3, "± %": timing.spread * 100}
