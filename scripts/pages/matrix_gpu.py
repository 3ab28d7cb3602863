"""Course machinery. Runs the cells of "What works with what" on a GPU, and writes what was found into the page.

python -m scripts.pages.matrix_gpu --jobs 8               run every cell, in 8 processes
python -m scripts.pages.matrix_gpu --jobs 8 --minutes 3   count what has run by then

Expected tokens are those of Hugging Face in float32 on the CPU, as in the page's tables.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

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


def run_cells(jobs: int, minutes: float) -> dict[str, str]:
    """Return the result of each cell that has run in time, by its key."""
    todo, results, end = list(cells()), {}, time.monotonic() + 60 * minutes
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(result_of, cell) for cell in todo]):
            if time.monotonic() > end:
                break
            results |= [done.result()]
            print(f"\r{len(results)} of {len(todo)} cells ", end="", file=sys.stderr, flush=True)
        pool.shutdown(cancel_futures=True)
    print(file=sys.stderr)
    return results


def main(argv: list[str] | None = None) -> int:
    """Run the cells, and write the counts and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="processes that share the GPU (default: 4)")
    parser.add_argument("--minutes", type=float, default=60, metavar="M", help="begin no cell later (default: 60)")
    args, machine = parser.parse_args(argv), describe_machine()
    if machine["gpu"] is None:
        parser.error("this torch sees no CUDA device")
    results = run_cells(args.jobs, args.minutes)
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
