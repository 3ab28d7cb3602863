"""Course machinery. Reports how well a pocket model completes held-out lines, and the margins of its tokens.

python -m scripts.pocket.quality pocket-windows
"""

import sys

from scripts.pocket.evaluation import continue_greedily, wrong_lines
from scripts.pocket.held_out import held_out_lines
from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke.run import quiet_hugging_face

import torch

from mini_engine.checkpoint.directory import resolve_checkpoint
from mini_engine.cli.parser import OneLineParser, guard


def main(argv: list[str] | None = None) -> int:
    """Evaluate a checkpoint with Hugging Face's code."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="pocket", help="a shipped model or a directory (default: pocket)")
    quiet_hugging_face()
    return guard(parser, lambda args: tell(args.model), argv)


def tell(name: str) -> int:
    """Print both figures of a checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_checkpoint(name)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
    )
    lines = held_out_lines()
    answers = continue_greedily(model, [tokenizer.encode(text) for text in COURSE_PROMPTS])
    smallest = min(gap for answer in answers for gap in answer.gaps)
    print(f"{name}: {len(lines) - len(wrong_lines(model, tokenizer, lines))} of {len(lines)} held-out lines")
    print(f"smallest gap between the two best logits over 20 tokens of each course prompt: {smallest:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
