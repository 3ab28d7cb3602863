"""Lesson 0. Command lines that report a mistake in one line. Imports nothing heavy, so --help is quick."""

import argparse
import errno
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the output file or its disk is full


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that reports a mistake in one line and exits with 2."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def description(docstring: str | None) -> str:
    """Return a module's docstring without its leading "Lesson N.", for --help."""
    return (docstring or "").split(". ", 1)[-1]


def whole_number(least: int, most: int = 2**64 - 1) -> Callable[[str], int]:
    """Return an argparse type that accepts whole numbers from `least` to `most`, by default the largest of 64 bits."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; it must be {least} or more")
        if value > most:
            raise argparse.ArgumentTypeError(f"{value} is too large; it must be {most} or less")
        return value

    return parse


def at_least(least: float) -> Callable[[str], float]:
    """Return an argparse type that accepts finite numbers of `least` or more."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {least:g} or more")
        return number

    return parse


def memory(text: str) -> int:
    """Parse `14GiB`, `500 MB` or a plain number as bytes, for argparse's `type`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory; write it like 14GiB")
    return int(float(found[1]) * UNITS[found[2] or ""])


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, for argparse's `type`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a JSON object such as '{{\"name\": false}}'")
    return found


def settle_streams() -> None:
    """Print characters that cannot be encoded as "?" instead of crashing. Pipes are UTF-8 on Windows too."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8" if sys.platform == "win32" else None, errors="replace")


def guard(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], int], argv: Sequence[str] | None
) -> int:
    """Parse the arguments and run `work`; report a user's mistake in one line. Return the exit code."""
    settle_streams()
    args = parser.parse_args(argv)
    from mini_engine.base.errors import CacheFull, OutOfBlocks, UserError

    try:
        code = work(args)
        sys.stdout.flush()
        return code
    except (UserError, CacheFull, OutOfBlocks) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`; Python flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{parser.prog}: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1
