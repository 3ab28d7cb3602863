"""Course machinery. Writes lessons/what-works-with-what.md from the results in what-works-with-what.json.

python -m scripts.pages.matrix            run every cell (some ten minutes), then write results and page
python -m scripts.pages.matrix --missing  run only cells without a result, as after a feature was added
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from scripts import ROOT
from scripts.pages.generated import fill, settle
from scripts.pages.matrix_cells import FEATURES, MODELS, Cell, cells
from scripts.pages.matrix_run import run

PAGE = ROOT / "lessons" / "what-works-with-what.md"
RESULTS = PAGE.with_suffix(".json")
ON_A_GPU = PAGE.with_suffix(".gpu.json")
COMMAND = "python -m scripts.pages.matrix"
EQUAL = "equal"
# a fragment of the engine's error message, and the reason for readers
REASONS: dict[str, str] = {}


def read_results() -> dict[str, str]:
    """Return the result of each cell by its key."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def reason_for(result: str) -> str:
    """Return why a cell is refused, for readers.

    Raises:
        LookupError: the message is new; add its reason to REASONS.
    """
    for words, reason in REASONS.items():
        if words in result:
            return reason
    raise LookupError(f"no reason for {result!r}; add one to REASONS in scripts/pages/matrix.py")


def table(model: str, results: Mapping[str, str], notes: dict[str, str]) -> str:
    """Return one model's table. notes: reason to letter; new reasons are added."""
    head = " | ".join(str(number) for number in range(1, len(FEATURES) + 1))
    lines = [f"| {model} | {head} |", f"| --- |{' :-: |' * len(FEATURES)}"]
    for row, feature in enumerate(FEATURES):
        marks = [mark(model, results, notes, row, column) for column in range(len(FEATURES))]
        lines.append(f"| {row + 1} [{feature.name}]({feature.lesson}/README.md) | {' | '.join(marks)} |")
    return "\n".join(lines)


def mark(model: str, results: Mapping[str, str], notes: dict[str, str], row: int, column: int) -> str:
    """Return a cell's text: a tick, a reason's letter, or nothing above the diagonal and between rivals."""
    if column > row:
        return ""
    pair = tuple(FEATURES[index] for index in sorted({row, column}))
    result = results.get(Cell(model, pair).key)
    if result is None:
        return "–"
    if result == EQUAL:
        return "✓"
    return notes.setdefault(reason_for(result), "abcdefghijklmnop"[len(notes)])


def page_text(page: str, results: Mapping[str, str]) -> str:
    """Return the page with its tables, reasons and counts filled from the results."""
    notes: dict[str, str] = {}
    tables = "\n\n".join(table(model, results, notes) for model in MODELS)
    reasons = "\n".join(f"- **{letter}**: {reason}." for reason, letter in notes.items())
    num_equal = sum(result == EQUAL for result in results.values())
    counts = f"{num_equal} of {len(results)} cells give the expected tokens; {len(results) - num_equal} are refused."
    return fill(page, "matrix", "\n\n".join(filter(None, (counts, tables, reasons))))


def run_cells(known: Mapping[str, str]) -> dict[str, str]:
    """Return the results of all cells, in order. Only those that are not known are run."""
    results, started = dict(known), time.perf_counter()
    todo = [cell for cell in cells() if cell.key not in known]
    for index, cell in enumerate(todo, 1):
        results[cell.key] = run(cell)
        print(f"\r{index} of {len(todo)} cells, {time.perf_counter() - started:.0f} s ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return {cell.key: results[cell.key] for cell in cells()}


def main(argv: list[str] | None = None) -> int:
    """Run the cells, and write results and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="keep the results that there are")
    results = run_cells(read_results() if parser.parse_args(argv).missing else {})
    if wrong := {key: result for key, result in results.items() if result.startswith("differs")}:
        print("\n".join(f"{key}: {result}" for key, result in wrong.items()), file=sys.stderr)
        return 1
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
    return settle(files(), check=False)


def on_a_gpu() -> str:
    """Return what the last run on a GPU found (`matrix_gpu`)."""
    found = json.loads(ON_A_GPU.read_text(encoding="utf-8"))
    machine = f"{found['gpu']}, {found['date']}, torch {found['torch']}, commit {found['commit']}"
    return "\n".join(
        (
            f"**On a GPU** ({machine}), where decode steps are captured,",
            f"{found['equal']} of the {found['cells']} cells that were run give the expected tokens. The others are",
            "refused:",
            "",
            *(f"- {count} cells: {why}" for why, count in found["refused"].items()),
        )
    )


def files() -> dict[Path, str]:
    """Return the text that the page should have."""
    page = page_text(PAGE.read_text(encoding="utf-8"), read_results())
    return {PAGE: fill(page, "matrix on a GPU", on_a_gpu())}


if __name__ == "__main__":
    sys.exit(main())
