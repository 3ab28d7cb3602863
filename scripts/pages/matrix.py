"""Course machinery. Writes lessons/what-works-with-what.md from the results in what-works-with-what.json.

python -m scripts.pages.matrix            run every cell (some ten minutes), then write results and page
python -m scripts.pages.matrix --missing  run only cells without a result, as after a feature was added
"""

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from scripts import ROOT
from scripts.pages.generated import fill, settle
from scripts.pages.matrix_cells import FEATURES, MODELS, Cell, cells

PAGE = ROOT / "lessons" / "what-works-with-what.md"
RESULTS = PAGE.with_suffix(".json")
ON_A_GPU = PAGE.with_suffix(".gpu.json")
COMMAND = "python -m scripts.pages.matrix"
EQUAL = "equal"
WHAT = {
    "Qwen3": "pocket: attention",
    "hybrid": "pocket-hybrid, a Qwen3.5: states and attention",
    "windows": "pocket-windows, a Qwen3: windows and attention",
    "latents": "pocket-latent, a DeepSeek-V3: latents",
    "all kinds": "a random LFM3: short convolutions, windows and attention",
    "Llama": "a random Llama 3: attention",
    "Gemma 3": "a random Gemma 3: windows and attention",
    "Qwen3-MoE": "a random Qwen3 with experts: attention",
    "DeepSeek-V2": "a random DeepSeek-V2 with experts: latents",
}


def read_results() -> dict[str, str]:
    """Return the result of each cell that has run, by its key. The file has only the others than EQUAL."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    ran, others = {*found["models"], *found["features"]}, found["others"]
    return {cell.key: others.get(cell.key, EQUAL) for cell in cells() if {cell.model, *cell.names} <= ran}


def write_results(results: Mapping[str, str]) -> None:
    """Write the results of all cells."""
    others = {key: result for key, result in results.items() if result != EQUAL}
    found = {"models": MODELS, "features": [feature.name for feature in FEATURES], "others": others}
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def models_table() -> str:
    """Return the table of models: what each is."""
    lines = ["| model | what it is |", "| --- | --- |"]
    return "\n".join(lines + [f"| {model} | {WHAT[model]} |" for model in MODELS])


def table(results: Mapping[str, str], notes: dict[str, str]) -> str:
    """Return the table of features, for all models. notes: reason to letter; new reasons are added."""
    head = " | ".join(str(number) for number in range(1, len(FEATURES) + 1))
    lines = [f"| feature | {head} |", f"| --- |{' :-: |' * len(FEATURES)}"]
    for row, feature in enumerate(FEATURES):
        marks = [mark(results, notes, row, column) for column in range(len(FEATURES))]
        lines.append(f"| {row + 1} [{feature.name}]({feature.lesson}/README.md) | {' | '.join(marks)} |")
    return "\n".join(lines)


def mark(results: Mapping[str, str], notes: dict[str, str], row: int, column: int) -> str:
    """Return a cell's text: a tick, the letters of reasons, or nothing above the diagonal and between rivals."""
    if column > row:
        return ""
    pair = tuple(FEATURES[index] for index in sorted({row, column}))
    found = {model: result for model in MODELS if (result := results.get(Cell(model, pair).key))}
    if not found:
        return "–"
    reasons = (f"{model}: {result}" for model, result in found.items() if result != EQUAL)
    letters = [notes.setdefault(reason, "abcdefghijklmnop"[len(notes)]) for reason in reasons]
    return ", ".join(letters) or "✓"


def page_text(page: str, results: Mapping[str, str]) -> str:
    """Return the page with its tables, reasons and counts filled from the results."""
    notes: dict[str, str] = {}
    grid = table(results, notes)
    reasons = "\n".join(f"- **{letter}**: {reason}." for reason, letter in notes.items())
    num_equal = sum(result == EQUAL for result in results.values())
    counts = (
        f"Each mark stands for all {len(MODELS)} models below, unless a letter says otherwise: "
        f"{num_equal} of {len(results)} cells give the expected tokens; {len(results) - num_equal} are refused."
    )
    grid = f'<div class="kv-grid" markdown="1">\n\n{grid}\n\n</div>'
    return fill(page, "matrix", "\n\n".join(filter(None, (grid, counts, reasons, models_table()))))


def result_of(cell: Cell, device: str) -> tuple[str, str]:
    """Run a cell. Returns its key and its result; an error that is no refusal counts as a difference."""
    from scripts.pages.matrix_run import run

    try:
        return cell.key, run(cell, device)
    except Exception as error:
        return cell.key, f"differs: {type(error).__name__}: {error}"


def run_cells(todo: Sequence[Cell], jobs: int, device: str = "cpu", minutes: float = math.inf) -> dict[str, str]:
    """Return the result of each cell that has run in time, by its key. jobs: the number of processes."""
    results: dict[str, str] = {}
    started = time.monotonic()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(result_of, cell, device) for cell in todo]):
            seconds = time.monotonic() - started
            if seconds > 60 * minutes:
                break
            results |= [done.result()]
            print(f"\r{len(results)} of {len(todo)} cells, {seconds:.0f} s ", end="", file=sys.stderr, flush=True)
        pool.shutdown(cancel_futures=True)
    print(file=sys.stderr)
    return results


def any_wrong(results: Mapping[str, str]) -> bool:
    """Print the cells that give other tokens than expected. Return True if there are any."""
    wrong = {key: result for key, result in results.items() if result.startswith("differs")}
    print("".join(f"{key}: {result}\n" for key, result in wrong.items()), end="", file=sys.stderr)
    return bool(wrong)


def main(argv: list[str] | None = None) -> int:
    """Run the cells, and write results and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="keep the results that there are")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: 2)")
    args = parser.parse_args(argv)
    known = read_results() if args.missing else {}
    results = known | run_cells([cell for cell in cells() if cell.key not in known], args.jobs)
    if any_wrong(results):
        return 1
    write_results(results)
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
