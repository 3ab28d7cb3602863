"""Lesson 0. Command lines whose mistakes are told in one line. Imports nothing heavy, so --help is quick."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence


class OneLineParser(argparse.ArgumentParser):
    """argparse, but a mistake is one sentence."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def whole_number(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least`."""

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
    """No character may end a program: one that cannot be shown is a "?". On Windows pipes and files are UTF-8 too."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8" if sys.platform == "win32" else None, errors="replace")


def guard(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], int], argv: Sequence[str] | None
) -> int:
    """Parse, work, and tell what the user got wrong in one line; the process's exit code."""
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
    except BrokenPipeError:  # whoever read our output has left, as `| head` does; Python writes to it once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
