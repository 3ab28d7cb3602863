"""Course machinery. Runs the cells of "What works with what" on a GPU, and writes what was found into the page.

python -m scripts.pages.matrix_gpu --jobs 8               run every cell, in 8 processes
python -m scripts.pages.matrix_gpu --jobs 8 --minutes 3   count what has run by then

Expected tokens are those of Hugging Face in float32 on the CPU, as in the page's tables.
"""

import argparse
import json
import random
import sys
from collections import Counter

from scripts.bench.common import describe_machine
from scripts.pages.generated import settle
from scripts.pages.matrix import EQUAL, ON_A_GPU, any_wrong, files, run_cells
from scripts.pages.matrix_cells import cells


def main(argv: list[str] | None = None) -> int:
    """Run the cells, and write the counts and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="processes that share the GPU (default: 4)")
    parser.add_argument("--minutes", type=float, default=60, metavar="M", help="begin no cell later (default: 60)")
    args, machine = parser.parse_args(argv), describe_machine()
    if machine["gpu"] is None:
        parser.error("this torch sees no CUDA device")
    todo = list(cells())
    random.Random(0).shuffle(todo)  # a run that ends early has some of each model
    results = run_cells(todo, args.jobs, "cuda", args.minutes)
    if any_wrong(results):
        return 1
    counts = Counter(results.values())
    found = {name: machine[name] for name in ("gpu", "date", "torch", "commit", "dirty")}
    found |= {"cells": len(results), "equal": counts.pop(EQUAL), "refused": dict(counts.most_common())}
    ON_A_GPU.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8", newline="\n")
    return settle(files(), check=False)


if __name__ == "__main__":
    sys.exit(main())
