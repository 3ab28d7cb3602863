"""Lesson 0. Command-line parsing with one-line error messages. Imports nothing heavy, so --help is quick."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage text."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers of `least` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; it must be {least} or more")
        return value

    return parse


def settle_streams() -> None:
    """Print "?" for characters that a stream cannot encode, instead of failing. On Windows, use UTF-8 everywhere."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8" if sys.platform == "win32" else None, errors="replace")


def guard(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], int], argv: Sequence[str] | None
) -> int:
    """Parse the arguments and run `work`, reporting user errors in one line. Returns the process's exit code."""
    settle_streams()
    args = parser.parse_args(argv)
    from mini_engine.errors import CacheFull, OutOfBlocks, UserError

    try:
        return work(args)
    except (UserError, CacheFull, OutOfBlocks) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # our reader is gone, as with `| head`; Python flushes to it once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
