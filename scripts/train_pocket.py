"""Course machinery. Makes a pocket model from scratch: its text, its tokenizer and its weights, on two CPU cores.

The corpus comes from facts and grammars in scripts/pocket. It is a Qwen3; with `--kind hybrid` a Qwen3.5, with
`--kind latent` a dense DeepSeek-V3. This course and transformers load each. The same steps and thread count on the
same machine give the same weights.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from mini_engine.cli.parser import OneLineParser, at_least, guard, whole_number

STEPS = {"qwen3": 1800, "hybrid": 600, "latent": 1800}
VOCAB_SIZE = 2048


def arguments() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--kind", choices=STEPS, default="qwen3", help="lesson 0's, 11's or 16's (default: qwen3)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: build/pocket, or build/pocket-KIND")
    parser.add_argument("--threads", type=whole_number(1), default=2, metavar="N", help="CPU threads (default: 2)")
    parser.add_argument(
        "--steps", type=whole_number(1), metavar="N", help="weight updates (default: 1800; hybrid: 600)"
    )
    parser.add_argument("--learning-rate", type=at_least(0), default=3e-3, metavar="X", help="peak (default: 0.003)")
    parser.add_argument("--start-from", default="", metavar="DIR", help="an earlier run, to go on with its weights")
    parser.add_argument("--first-step", type=whole_number(0), default=0, metavar="N", help="that run's steps")
    parser.add_argument("--float32", action="store_true", help="no bfloat16 arithmetic: for CPUs that lack it")
    return parser


def run(args: argparse.Namespace) -> int:
    """Train, write and evaluate. Nothing is written to --out until the training has succeeded."""
    from scripts.pocket import quality
    from scripts.pocket.checkpoint import all_or_nothing, write_checkpoint
    from scripts.pocket.corpus import build_corpus
    from scripts.pocket.tokenizer import train_tokenizer
    from scripts.pocket.training import Plan, train

    out = args.out or Path("build") / ("pocket" if args.kind == "qwen3" else f"pocket-{args.kind}")
    args.steps = args.steps or STEPS[args.kind]
    documents = build_corpus()
    with all_or_nothing(out) as directory:
        tokenizer = train_tokenizer(documents, VOCAB_SIZE)
        model = train(Plan(**{field.name: getattr(args, field.name) for field in fields(Plan)}), documents, tokenizer)
        write_checkpoint(model, tokenizer, directory)
    return quality.tell(str(out))


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads do not occupy shared cores
    return guard(arguments(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
