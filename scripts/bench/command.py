"""Course machinery. The command behind scripts/bench.py: choose a suite, measure, print the table, write the files.

A suite is a module in this folder with a `run` function. The first line of its docstring says what it measures,
`run(args)` measures and returns a `common.Report`. `args.rates` holds the machine's rates, measured just before. A
suite may define `add_arguments(parser)` for its options, `draw(report, path)` for a picture, and `finish(report, args)`
for work after the report, whose result is the exit code.
"""

import ast
import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from scripts import first_line

from rich.console import Console

from lessons._course.tables import Column, show
from mini_engine.cli.parser import OneLineParser, guard, whole_number


@cache
def suites() -> dict[str, str]:
    """Return the name and summary of every suite, without importing any."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem] = first_line(ast.get_docstring(tree)).split(": ", 1)[-1]
    return found


def choose_suite(argv: Sequence[str]) -> str:
    """Return the suite named by the first argument. Without one, print the list of suites and exit."""
    summaries = suites()
    if not argv or argv[0] in ("-h", "--help"):
        usage = "usage: bench.py SUITE [--quick] [--rounds N] [--json FILE] [--help]"
        print(f"{usage}\n\nMeasure what the lessons claim, on this machine.\n")
        show(Console(highlight=False), [Column(is_text=True)] * 2, list(summaries.items()))
        sys.exit(0 if argv else 2)
    if argv[0] not in summaries:
        sys.stderr.write(f"bench.py: there is no suite {argv[0]!r}; the suites: {', '.join(summaries)}\n")
        sys.exit(2)
    return argv[0]


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    name = choose_suite(argv)
    let_threads_wait_as_in_use()
    suite = importlib.import_module(f"scripts.bench.{name}")
    parser = OneLineParser(prog=f"bench.py {name}", description=suites()[name])
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds, for a first impression")
    parser.add_argument("--rounds", type=whole_number(1), metavar="N", help="how many times each contender runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    if hasattr(suite, "draw"):
        parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="also draw a picture (.svg, .png or .pdf)")
    if hasattr(suite, "add_arguments"):
        suite.add_arguments(parser)
    return guard(parser, lambda args: measure(suite, args), argv[1:])


def let_threads_wait_as_in_use() -> None:
    """Keep the caller's OMP_WAIT_POLICY instead of the one that scripts.smoke sets. Call before torch is loaded."""
    asked = os.environ.get("OMP_WAIT_POLICY")
    import scripts.smoke  # noqa: F401 (it sets the policy on its first import, so no later import does)

    if asked is None:
        os.environ.pop("OMP_WAIT_POLICY", None)


def measure(suite: ModuleType, args: Namespace) -> int:
    """Measure the machine, then the suite; print the table and write the requested files."""
    from scripts.bench.plot import check_plot
    from scripts.bench.turns import measure_rates
    from scripts.smoke.arguments import pick_device

    import torch

    plot = getattr(args, "plot", None)
    if plot:
        check_plot(plot)  # fail before spending minutes
    if getattr(args, "threads", None):
        torch.set_num_threads(args.threads)
    args.rates = measure_rates(pick_device(getattr(args, "device", "cpu")))
    report = suite.run(args)
    report.machine |= args.rates.facts()
    report.show()
    if args.json:
        report.write(args.json)
    if plot:
        suite.draw(report, plot)
    return suite.finish(report, args) if hasattr(suite, "finish") else 0
