"""Course machinery. Runs the cells of "What works with what" on a GPU, and writes what was found into the page.

python -m scripts.pages.matrix_gpu --jobs 8  run every cell, in 8 processes

Expected tokens are those of Hugging Face in float32 on the CPU, as in the page's tables.
"""

import argparse
import json
import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from scripts.bench.common import describe_machine
from scripts.pages.generated import settle
from scripts.pages.matrix import EQUAL, ON_A_GPU, files
from scripts.pages.matrix_cells import Cell, cells


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


def main(argv: list[str] | None = None) -> int:
    """Run the cells, and write the counts and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="processes that share the GPU (default: 4)")
    args, machine = parser.parse_args(argv), describe_machine()
    if machine["gpu"] is None:
        parser.error("this torch sees no CUDA device")
    results = run_cells(args.jobs)
    if wrong := {key: result for key, result in results.items() if result.startswith("differs")}:
        print("\n".join(f"{key}: {result}" for key, result in wrong.items()), file=sys.stderr)
        return 1
    counts = Counter(results.values())
    found = {name: machine[name] for name in ("gpu", "date", "torch", "commit", "dirty")}
    found |= {"cells": len(results), "equal": counts.pop(EQUAL), "refused": dict(counts.most_common())}
    ON_A_GPU.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8", newline="\n")
    return settle(files(), check=False)


if __name__ == "__main__":
    sys.exit(main())
