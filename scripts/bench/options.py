"""Course machinery. Options that several suites have, and the checkpoint that they name."""

import argparse
import os
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from scripts.make_random_qwen3 import SHAPES
from scripts.make_random_qwen3 import main as make_random
from scripts.smoke.arguments import pocket_dir

from mini_engine.base.errors import UserError
from mini_engine.cli.parser import whole_number


def numbers(known: Collection[int] = ()) -> Callable[[str], list[int]]:
    """Return an argparse type for ascending comma-separated numbers: some of `known`, or any from 1 on."""

    def parse(text: str) -> list[int]:
        parts = text.split(",")
        found = sorted({int(part) for part in parts if part.isdecimal()})
        if not all(map(str.isdecimal, parts)) or not (set(found) <= set(known) if known else found[0] > 0):
            wanted = f"some of {','.join(map(str, known))}" if known else "numbers such as 1,8,16"
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers; give {wanted}")
        return found

    return parse


def add_batches(parser: ArgumentParser, default: Collection[int]) -> None:
    said = ",".join(map(str, default))
    parser.add_argument("--batches", type=numbers(), default=default, metavar="1,8,…", help=f"default: {said}")


def add_choice(parser: ArgumentParser, name: str, known: Collection[str]) -> None:
    """Add an option that takes some of `known`."""
    parser.add_argument(f"--{name}", nargs="+", choices=known, default=known, help="default: all of them")


def add_threads(parser: ArgumentParser, default: int | None = None) -> None:
    said = f"torch's threads (default: {default or 'torch chooses'})"
    parser.add_argument("--threads", type=whole_number(1), default=default, metavar="N", help=said)


def add_dtype(parser: ArgumentParser, default: str) -> None:
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=default, help=f"default: {default}")


def add_model(parser: ArgumentParser) -> None:
    """Add the model of a suite that needs no large one."""
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="a Qwen3 checkpoint (default: the pocket model)")


def model_of(args: Namespace) -> Path:
    """Return the directory that `add_model`'s option names."""
    from mini_engine.checkpoint.directory import resolve_checkpoint

    return resolve_checkpoint(args.model or pocket_dir())


def add_checkpoint(parser: ArgumentParser, shape: str = "0.6B") -> None:
    """Add the model of a suite that measures speed: a checkpoint, or random weights of a shape."""
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint (default: random weights)")
    words: dict[str, Any] = {"choices": SHAPES, "metavar": "SHAPE"}
    parser.add_argument("--shape", default=shape, **words, help=f"of the random weights (default: {shape})")
    add_dtype(parser, "bfloat16")


def link_or_copy(source: Path, folder: Path) -> None:
    """Put a checkpoint's file into another folder, without a second copy on the same disk. One that is there stays."""
    if (target := folder / source.name).exists():
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def checkpoint_of(args: Namespace) -> Path:
    """Return the directory that `add_checkpoint`'s options name; the random weights are written if necessary."""
    if args.model:
        return model_of(args)
    out = Path("build") / f"random-qwen3-{args.shape}{'' if args.dtype == 'bfloat16' else '-' + args.dtype}"
    options = ["--shape", args.shape, "--dtype", args.dtype, "--out", str(out)]
    if not (out / "config.json").is_file() and make_random(options):
        raise UserError(f"no checkpoint could be written to {out}; give --model")
    return out
