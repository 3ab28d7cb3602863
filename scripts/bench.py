"""Course machinery. `python scripts/bench.py SUITE`: measure on this machine what the lessons claim.

A suite is a module `bench_SUITE.py` beside this one: its docstring's first line says what it measures,
`add_arguments(parser)` adds its options, `run(args)` measures and returns a `bench_common.Report`.
"""

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from mini_engine.cli.parser import OneLineParser, guard, whole_number


def suites() -> dict[str, str]:
    """Name and summary of every suite; nothing is imported for it."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem.removeprefix("bench_")] = ast.get_docstring(tree).splitlines()[0].split(": ", 1)[-1]
    return found


def choose_suite(argv: Sequence[str]) -> str:
    """The suite that the first argument names; without one, the list of suites and the end."""
    summaries = suites()
    if not argv or argv[0] in ("-h", "--help"):
        listing = "\n".join(f"  {name:<12}{summary}" for name, summary in summaries.items())
        print(f"usage: bench.py SUITE [--quick] [--json FILE] [--help]\n\nMeasure what the lessons claim.\n\n{listing}")
        sys.exit(0 if argv else 2)
    if argv[0] not in summaries:
        sys.stderr.write(f"bench.py: there is no suite {argv[0]!r}; choose one of {', '.join(summaries)}\n")
        sys.exit(2)
    return argv[0]


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    name = choose_suite(argv)
    suite = importlib.import_module(f"bench_{name}")
    parser = OneLineParser(prog=f"bench.py {name}", description=suites()[name])
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: a first impression")
    parser.add_argument("--rounds", type=whole_number(1), metavar="N", help="how often each contender runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there as well")
    suite.add_arguments(parser)

    def work(args) -> int:
        report = suite.run(args)
        report.show()
        if args.json:
            report.write(args.json)
        return 0

    return guard(parser, work, argv[1:])


if __name__ == "__main__":
    sys.exit(main())
