"""Course machinery. Runs the cells of "What works with what" on a GPU, and writes what was found into the page.

python -m scripts.pages.matrix_gpu --jobs 8  run every cell, in 8 processes; then write the counts and the page
python -m scripts.pages.matrix_gpu --check   run nothing; exit 1 if the page does not fit the counts

Expected tokens are those of Hugging Face in float32 on the CPU, as in the page's tables.
"""

import argparse
import json
import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from scripts.bench.common import describe_machine
from scripts.pages.generated import fill, settle
from scripts.pages.matrix import EQUAL, PAGE
from scripts.pages.matrix_cells import Cell, cells

COUNTS = PAGE.with_suffix(".gpu.json")
COMMAND = "python -m scripts.pages.matrix_gpu"


def result_of(cell: Cell) -> tuple[str, str]:
    """Run a cell on the GPU. Returns its key and its result; an error that is no refusal counts as a difference."""
    from scripts.pages.matrix_run import run

    try:
        return cell.key, run(cell, "cuda")
    except Exception as error:
        return cell.key, f"differs: {type(error).__name__}: {error}"


def run_cells(jobs: int) -> dict[str, str]:
    """Return each cell's result by its key."""
    todo, results = list(cells()), {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for key, result in pool.map(result_of, todo, chunksize=4):
            results[key] = result
            print(f"\r{len(results)} of {len(todo)} cells ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def text() -> str:
    """Return what the last run found."""
    found = json.loads(COUNTS.read_text(encoding="utf-8"))
    machine = f"{found['gpu']}, {found['date']}, torch {found['torch']}, commit {found['commit']}"
    return "\n".join(
        (
            f"**On a GPU** ({machine}), where decode steps are captured,",
            f"{found['equal']} of {found['cells']} cells give the expected tokens. The others are refused:",
            "",
            *(f"- {count} cells: {why}" for why, count in found["refused"].items()),
        )
    )


def main(argv: list[str] | None = None) -> int:
    """Run the cells, unless --check is given, and write the page or say that it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="processes that share the GPU (default: 4)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is out of date")
    args = parser.parse_args(argv)
    if not args.check:
        machine = describe_machine()
        if machine["gpu"] is None:
            parser.error("this torch sees no CUDA device")
        results = run_cells(args.jobs)
        if wrong := {key: result for key, result in results.items() if result.startswith("differs")}:
            print("\n".join(f"{key}: {result}" for key, result in wrong.items()), file=sys.stderr)
            return 1
        counts = Counter(results.values())
        found = {name: machine[name] for name in ("gpu", "date", "torch", "commit", "dirty")}
        found |= {"cells": len(results), "equal": counts.pop(EQUAL), "refused": dict(counts.most_common())}
        COUNTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8", newline="\n")
    page = fill(PAGE.read_text(encoding="utf-8"), "matrix on a GPU", text())
    return settle({PAGE: page}, args.check, COMMAND)


if __name__ == "__main__":
    sys.exit(main())
