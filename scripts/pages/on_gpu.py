"""Course machinery. Writes lesson 10's tables of a GPU, from the authors' report and a kept run of `bench.py many`."""

import json
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.machine.page import figure
from scripts.machine.schema import Report
from scripts.machine.stored import read
from scripts.pages.generated import fill, markdown
from scripts.pages.seen_on import CAPTURED, speed_at

PAGE = ROOT / "lessons" / "l10_device" / "README.md"
MANY = PAGE.with_name("many.json")
REPORT = ROOT / "lessons" / "reports" / "authors" / "2026-11-h100.json"


def sentence(report: Report) -> str:
    """Return the gain of capturing with the fewest and with the most requests."""
    found = [one for one in report.comparisons if one.first == CAPTURED and one.status == "ok"]
    few, many = ((figure(one.first_ms), figure(one.second_ms), one.at_once) for one in (found[0], found[-1]))
    return (
        f"**On a GPU**, an H100, the host's share is nearly the whole step: captured it takes {few[0]} ms instead of "
        f"{few[1]} with\none request, and {many[0]} instead of {many[1]} with {many[2]}, though both run the same "
        "kernels (`python scripts/report.py`)."
    )


def steps(report: Report) -> str:
    """Return the table of decode steps, captured and eager, with the report's description of the machine."""
    assert report.machine.gpu and report.model
    rows = []
    for one in report.comparisons:
        speed = speed_at(report, "decode", one.at_once)
        if one.first == CAPTURED and one.status == "ok" and speed:
            cells = [one.first_ms, one.second_ms, one.times, speed.tokens_per_second]
            rows.append([str(one.at_once), *map(figure, cells), f"{100 * (speed.memory_share or 0):.0f} %"])
    head = ["requests at once", "captured, ms a step", "eager, ms a step", "times", "new tokens/s", "of memory's rate"]
    return (
        f"{report.machine.gpu.name}, {report.model.shape} with random weights, {report.model.dtype}, "
        f"{report.when[:10]} ([the whole report](../reports/authors/{REPORT.name})):\n\n{markdown(head, rows, texts=0)}"
    )


def many() -> str:
    """Return the table of 256 requests at once."""
    found: dict[str, Any] = json.loads(MANY.read_text(encoding="utf-8"))
    machine = found["machine"]
    rows = []
    for row in found["rows"]:
        figures = [figure(row[name]) for name in ("tokens/s", "seconds", "ms")]
        rows.append([row["ours"].removesuffix(" steps"), *figures, f"{figure(row['% of memory'])} %"])
    about = (
        f"{found['notes'][0]}; {machine['gpu']}, {machine['date']}, memory read at {machine['read_gb_s']:,.0f} GB/s:"
    )
    head = ["steps", "tokens/s", "seconds", "ms a full step", "of memory's rate"]
    return f"{about}\n\n{markdown(head, rows)}"


def files() -> dict[Path, str]:
    """Return the text that the page should have."""
    report = read(REPORT)
    page = fill(PAGE.read_text(encoding="utf-8"), "a GPU in a sentence", sentence(report))
    page = fill(page, "steps on a GPU", steps(report))
    return {PAGE: fill(page, "many requests on a GPU", many())}
