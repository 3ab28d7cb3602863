"""Course machinery. Makes a pocket model from scratch: its text, its tokenizer and its weights, on two CPU cores.

The corpus comes from facts and grammars in scripts/pocket. It is a Qwen3; with `--kind hybrid` a Qwen3.5, with
`--kind latent` a dense DeepSeek-V3. This course and transformers load each. The same seed, steps and thread count on
the same machine give the same weights.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from scripts.pocket.plan import KINDS, Plan
from scripts.smoke.report import print_json

from mini_engine.cli.parser import OneLineParser, guard, whole_number

DEFAULT_OUTS = {"qwen3": "build/pocket", "hybrid": "build/pocket-hybrid", "latent": "build/pocket-latent"}


def positive_number(text: str) -> float:
    """Parse a number above zero (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above zero")
    return value


def arguments() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="lesson 0's, 11's or 16's (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: build/pocket, or build/pocket-KIND")
    parser.add_argument(
        "--saved-run", type=Path, metavar="FILE", help="save the run here as it goes, and continue from it"
    )
    parser.add_argument("--seed", type=whole_number(0), metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=whole_number(1), metavar="N", help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--steps", type=whole_number(1), metavar="N", help="weight updates (default: 1800; hybrid: 600)"
    )
    parser.add_argument("--batch-size", type=whole_number(1), metavar="N", help="rows per step (default: %(default)s)")
    parser.add_argument("--row-length", type=whole_number(8), metavar="N", help="tokens per row (default: %(default)s)")
    parser.add_argument("--learning-rate", type=positive_number, metavar="X", help="peak rate (default: %(default)s)")
    parser.add_argument("--vocab-size", type=whole_number(300), metavar="N", help="at most (default: %(default)s)")
    parser.add_argument("--hidden-size", type=whole_number(8), metavar="N", help="width (default: %(default)s)")
    parser.add_argument("--layers", type=whole_number(1), metavar="N", help="layers (default: 6; hybrid: 8)")
    parser.add_argument(
        "--documents", type=whole_number(1), metavar="N", help="train on only N documents (default: all)"
    )
    parser.add_argument(
        "--start-from", metavar="DIR", help="begin with an earlier run's weights (default: random ones)"
    )
    parser.add_argument(
        "--first-step", type=whole_number(0), metavar="N", help="that run's steps, to go on in the text"
    )
    parser.add_argument("--float32", action="store_true", help="no bfloat16 arithmetic: for CPUs that lack it")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(**asdict(Plan()) | {"layers": None, "steps": None})
    return parser


def make_checkpoint(plan: Plan, documents: list[str], directory: Path, quiet: bool, saved_run: Path | None) -> dict:
    """Train and write to `directory`. Return the figures of the run."""
    from scripts.pocket.checkpoint import write_checkpoint
    from scripts.pocket.progress import progress
    from scripts.pocket.saved_run import SavedRun
    from scripts.pocket.tokenizer import train_tokenizer
    from scripts.pocket.training import train

    started = time.perf_counter()
    tokenizer = train_tokenizer(documents, plan.vocab_size)
    losses: list[float] = []
    with progress(plan.steps, quiet) as report:

        def note(loss: float) -> None:
            losses.append(loss)
            report(loss)

        model = train(plan, documents, tokenizer, note, SavedRun(saved_run) if saved_run else None)
    write_checkpoint(model, tokenizer, directory)
    return {
        "parameters": model.num_parameters(),
        "bytes": sum(file.stat().st_size for file in directory.iterdir()),
        "documents": len(documents),
        "tokens_read": plan.tokens,
        "last_loss": losses[-1],
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time(),
    }


def examine(directory: Path) -> dict:
    """Evaluate the written checkpoint in float32: held-out facts, and logit gaps on the course's prompts."""
    from scripts.pocket.evaluation import continue_greedily, wrong_lines
    from scripts.pocket.facts import held_out_lines, load_facts
    from scripts.pocket.prompts import COURSE_PROMPTS

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    lines = list(held_out_lines(load_facts()).values())
    wrong = wrong_lines(model, tokenizer, lines)
    answers = continue_greedily(model, [tokenizer.encode(prompt) for prompt in COURSE_PROMPTS])
    smallest = min(range(len(answers)), key=lambda i: min(answers[i].gaps))
    return {
        "held_out": {"lines": len(lines), "right": len(lines) - len(wrong), "wrong": [line.prompt for line in wrong]},
        "smallest_gap": {"gap": min(answers[smallest].gaps), "prompt": COURSE_PROMPTS[smallest]},
        "paris": tokenizer.decode(answers[0].token_ids),
    }


def show(result: dict) -> None:
    """Print the result for people."""
    held_out, gap = result["held_out"], result["smallest_gap"]
    print(f"{result['out']}: {result['parameters']:,} parameters, {result['bytes'] / 2**20:.2f} MiB")
    print(
        f"trained on {result['documents']:,} documents, {result['tokens_read']:,} tokens read, last loss "
        f"{result['last_loss']:.3f}, {result['seconds'] / 60:.1f} minutes, {result['cpu_seconds'] / 60:.1f} of CPU time"
    )
    print(f"held-out lines completed correctly: {held_out['right']} of {held_out['lines']}")
    print(f"smallest gap between the two highest logits: {gap['gap']:.3f}, after {gap['prompt']!r}")
    print(f"after 'The capital of France is': {result['paris']!r}")


def run(args: argparse.Namespace) -> int:
    """Train, evaluate, and put the files in place. Nothing is written to --out until everything has succeeded."""
    from scripts.pocket.checkpoint import all_or_nothing
    from scripts.pocket.corpus import build_corpus

    from transformers.utils.logging import disable_progress_bar

    from mini_engine.base.errors import UserError

    args.out = args.out or Path(DEFAULT_OUTS[args.kind])
    for name, value in KINDS[args.kind].items():
        setattr(args, name, getattr(args, name) or value)
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out} is a file; give a directory, which is created if necessary")
    disable_progress_bar()
    plan = Plan(**{field.name: getattr(args, field.name) for field in fields(Plan)})
    documents = build_corpus(plan.seed)[: args.documents]
    with all_or_nothing(args.out) as directory:
        figures = make_checkpoint(plan, documents, directory, args.json, args.saved_run)
        result = {"out": str(args.out), **figures, **examine(directory)}
    if args.saved_run:
        args.saved_run.unlink(missing_ok=True)
    if args.json:
        print_json(result)
    else:
        show(result)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads do not occupy shared cores
    return guard(arguments(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
