"""Course machinery. The command line of `python -m lessons`: commands, options and help."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lessons._course import commands
from lessons._course.desk import COMMAND
from lessons._course.limits import TOTAL_SECONDS
from lessons._course.places import CourseError
from mini_engine.cli.parser import OneLineParser, guard, whole_number

COMMANDS = (
    commands.doctor,
    commands.start,
    commands.check,
    commands.watch,
    commands.hint,
    commands.diff,
    commands.solution,
    commands.reset,
    commands.play,
    commands.certificate,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. A user's mistake prints one sentence and returns 2."""
    try:
        return guard(make_parser(), run, argv)
    except CourseError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Call a command with its options by name. Without a command, show the overview."""
    options = vars(args)
    name, list_as_json = options.pop("command"), options.pop("list_as_json")
    if name is None:
        return commands.overview(list_as_json)
    return getattr(commands, name)(**options)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser. A command's options are named like the parameters of its function."""
    parser = OneLineParser(
        prog=COMMAND,
        description="The course's commands. Without a command: list the lessons, your progress and the next step.",
        epilog=f"`{COMMAND} COMMAND --help` lists a command's options.",
        allow_abbrev=False,
    )
    add_json(parser, "list_as_json")
    subparsers = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND", parser_class=OneLineParser)
    for command in COMMANDS:
        name, text = command.__name__, command.__doc__
        add_options(subparsers.add_parser(name, help=text, description=text, allow_abbrev=False), name)
    return parser


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the arguments and options of command `name`."""
    if name == "play":
        add_play_options(parser)
    elif name == "certificate":
        add_certificate_options(parser)
    elif name != "doctor":
        parser.add_argument("number", metavar="N", help="the lesson's number")
    if name in ("hint", "solution"):
        parser.add_argument("task", metavar="TASK", type=whole_number(1), nargs="?", help="the task's number")
    if name in ("diff", "solution"):
        parser.add_argument("--give-up", action="store_true", help="include the tasks that you have not done")
    if name == "start":
        parser.add_argument("--fresh", action="store_true", help="write a new starter beside your file; yours is kept")
    if name == "check":
        add_check_options(parser)
    if name == "diff":
        add_view_options(parser)


def add_check_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--task", metavar="K", type=whole_number(1), help="run only the tests of task K")
    what.add_argument("--all", dest="everything", action="store_true", help="run everything, whatever fails")
    parser.add_argument("--core", action="store_true", help="the core's tasks only; the others are the reference's")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the first failure in full")
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=seconds,
        default=TOTAL_SECONDS,
        help="for the whole check; more on a slow or busy machine (default: %(default).0f)",
    )
    parser.add_argument("--trace", action="store_true", help="no tests: show your own run as an animated picture")
    parser.add_argument(
        "--open",
        dest="browser",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --trace: open the page in a browser (the default)",
    )
    add_json(parser, "as_json")


def add_play_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("game", metavar="GAME", choices=("evictor",), help="evictor")
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help="yours, with a class named Evictor")
    parser.add_argument("--seed", metavar="N", type=whole_number(0), help="of the load (default: today's)")
    parser.add_argument("--example", metavar="PATH", type=Path, help="write an evictor to begin with, and do no more")
    add_json(parser, "as_json")


def add_certificate_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--name", metavar="NAME", help="write one for this person")
    what.add_argument("--verify", metavar="FILE", type=Path, help="verify this one; runs its lessons' checks again")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write it (default: work/certificate.html)")
    parser.add_argument("--work", metavar="FOLDER", type=Path, help="the files to verify (default: work)")
    add_json(parser, "as_json")


def add_view_options(parser: argparse.ArgumentParser) -> None:
    views = parser.add_mutually_exclusive_group()
    views.add_argument(
        "--side-by-side", dest="side", action="store_true", default=None, help="two columns (default if wide enough)"
    )
    views.add_argument("--unified", dest="side", action="store_false", default=None, help="one column, like `git diff`")


def add_json(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("--json", dest=name, action="store_true", help="print one JSON object, for programs")


def seconds(text: str) -> float:
    """Parse a number of seconds, at least 1 (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not value >= 1:  # NaN too
        raise argparse.ArgumentTypeError(f"{text} is too short; it must be 1 second or more")
    return value
