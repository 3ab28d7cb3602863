"""Course machinery. The smoke scripts' arguments, and the model and prompts that they name."""

import argparse
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts import first_line

from mini_engine.cli.parser import OneLineParser, whole_number

DEFAULT_PROMPTS = ["The capital of France is"]


def long_prompt(times: int) -> str:
    """Return a prompt that repeats a sentence of 13 tokens."""
    return "Once upon a time there was a brave bear named Bruno. " * times + "The capital of France is"


def id_list(text: str) -> list[int]:
    """Parse comma-separated token ids (an argparse type)."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def make_parser(
    doc: str | None,
    *,
    block_size: int | None = None,
    kernel: bool = False,
    also: str | None = None,
    counts: Mapping[str, tuple[int, str]] | None = None,
    **defaults,
) -> argparse.ArgumentParser:
    """Return a parser with the options that every smoke script has, and those that several have.

    Args:
        doc: the script's docstring; its first line describes it.
        block_size: the default of `--block-size`, which only scripts with blocks have.
        kernel: whether the script can run another attention kernel.
        also: what `--all` adds, if the script has more paths than it usually runs.
        counts: options of this script that are whole numbers from 1, each with its default and its help.
        defaults: `load_model` and `default_model`, in scripts for another family of models.
    """
    parser = OneLineParser(description=first_line(doc))
    parser.set_defaults(**defaults)
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="a Qwen3 checkpoint (default: the pocket model)")
    parser.add_argument("--hf-model", metavar="DIR_OR_HUB_ID", help="checkpoint for Hugging Face (default: the same)")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated")
    prompts.add_argument(
        "--prompt-ids", action="append", type=id_list, metavar="1,2,3", help="token ids instead of text"
    )
    parser.add_argument("--max-new-tokens", type=whole_number(1), default=20, metavar="N", help="default: 20")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    sizes = {"--block-size": (block_size, "slots in a block")} if block_size else {}
    for option, (default, what) in {**sizes, **(counts or {})}.items():
        number = {"type": whole_number(1), "default": default, "metavar": "N"}
        parser.add_argument(option, **number, help=f"{what} (default: {default})")
    if kernel:
        names = "auto, reference, blockwise, torch, cpu or triton"
        parser.add_argument("--kernel", default="auto", metavar="NAME", help=names)
    if also:
        parser.add_argument("--all", action="store_true", help=also)
    return parser


def blocks_for(prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> list[int]:
    """Return the number of blocks that each prompt and its answer need."""
    return [-(-(len(ids) + args.max_new_tokens) // args.block_size) for ids in prompts]


def with_prompts(argv: Sequence[str] | None, parser: argparse.ArgumentParser, prompts: Sequence[str]) -> list[str]:
    """Return `argv` with a script's default prompts added if it names none."""
    argv = sys.argv[1:] if argv is None else list(argv)
    asked = parser.parse_args(argv)
    return argv if asked.prompt or asked.prompt_ids else [*argv, *(p for text in prompts for p in ("--prompt", text))]


def load_ours(args: argparse.Namespace):
    """Return the model and the prompts that `args` names. Resolves `args.device` and `args.model` in place."""
    args.device = pick_device(args.device)
    args.model = args.model or getattr(args, "default_model", None) or str(pocket_dir())
    model = load_model_of(args)
    return model, encode_prompts(args, model.config)


def load_model_of(args: argparse.Namespace):
    """Return the model that `args` names, once `load_ours` has resolved the name."""
    from mini_engine.checkpoint.config import DTYPES
    from mini_engine.families.qwen3 import load_model

    load = getattr(args, "load_model", load_model)  # from lesson 11 on there are other families of models
    return load(args.model, DTYPES[args.dtype], args.device)


def pick_device(name: str) -> str:
    """Return the device to run on. Raises UserError for a GPU that does not exist."""
    import torch

    from mini_engine.base.errors import UserError

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this torch sees no CUDA device; use --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def pocket_dir() -> Path:
    """Return the directory of the shipped checkpoint."""
    from mini_engine.pocket import POCKET_DIR

    return POCKET_DIR


def tokenizer_of(args: argparse.Namespace):
    """Return the checkpoint's tokenizer, or None if it has none (token ids need no tokenizer)."""
    from mini_engine.checkpoint.directory import resolve_checkpoint

    return _tokenizer_in(resolve_checkpoint(args.model))


@functools.cache  # a script asks once for every path it compares
def _tokenizer_in(directory: Path):
    from transformers import AutoTokenizer

    from mini_engine.base.errors import UserError

    if not any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # transformers raises whatever the damaged file leads to
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{directory} has a tokenizer that transformers cannot read ({why})") from error


def encode_prompts(args: argparse.Namespace, config) -> list[list[int]]:
    """Return the prompts as token ids, checked against the model."""
    from mini_engine.base.errors import UserError

    prompts = args.prompt_ids
    if prompts is None:
        tokenizer = tokenizer_of(args)
        if tokenizer is None:
            raise UserError(f"{args.model} has no tokenizer; give --prompt-ids 1,2,3 instead of text")
        prompts = [tokenizer.encode(text) for text in args.prompt or DEFAULT_PROMPTS]
    for ids in prompts:
        config.check_prompt(ids, args.max_new_tokens)
    return prompts
