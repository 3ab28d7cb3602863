"""Course machinery. Writes lesson 19's tables from its kept run of `bench.py handover`.

A prompt that is handed over causes one long gap. The more gaps there are while it is computed, the further out in the
tail this one is, so the tables have p99.9 and the largest in addition to p99.
"""

import json
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.pages.generated import fill, markdown

PAGE = ROOT / "lessons" / "l19_handover" / "README.md"
RUN = PAGE.with_name("handover.json")
NAMES = {
    "no chunks": "in one step each",
    "chunks of 512": "in chunks of 512",
    "chunks of 128": "in chunks of 128",
    "hand-over": "by a prefill worker",
}
Row = dict[str, Any]


def ms(value: float) -> str:
    """Return milliseconds with only the significant digits."""
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def gaps(rows: list[Row]) -> str:
    """Return the table of the page's beginning: one process."""
    cells = [
        [
            NAMES[row["prompts"]],
            ms(row["p50 ms"]),
            ms(row["p99 ms"]),
            f"**{ms(row['max ms'])}**",
            f"{row['first s']:.2f} s",
        ]
        for row in rows[:-1]
    ]
    return markdown(["the prompts are computed", "gap, p50", "p99", "largest", "first token of a prompt"], cells)


def all_gaps(rows: list[Row]) -> str:
    """Return the table with hand-over."""
    cells = []
    for row in rows:
        middle = [ms(row[f"{key} ms"]) for key in ("idle", "p50", "p99", "p99.9")]
        cells.append([NAMES[row["prompts"]], *middle, f"**{ms(row['max ms'])}**", three_digits(row["tokens/s"])])
    head = ["the prompts are computed", "between prompts, p50", "meanwhile, p50", "p99", "p99.9", "largest", "tokens/s"]
    return markdown(head, cells)


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def costs(rows: list[Row]) -> str:
    """Describe the costs of hand-over: one long gap for each prompt, and two longer medians."""
    *others, handed = rows
    idle = sorted(row["idle ms"] for row in others)
    return (
        f"That is one gap of the {handed['gaps a prompt']:.0f} that a prompt lasts, so p99 leaves it out by "
        "construction; p99.9 and the largest have it.\n"
        f"Two things cost more. Between prompts, a token takes {handed['idle ms']:.1f} ms instead of {idle[0]:.1f} to "
        f"{idle[-1]:.1f}, because\ndecoding has one core of two; and a prompt waits {handed['first s']:.2f} s for its "
        f"first token instead of {others[0]['first s']:.2f} s, because one core\ncomputes it."
    )


def transfer(row: Row) -> str:
    """Return the table of transfers."""
    copies = ms(row["copy in ms"]), ms(row["copy out ms"])
    cells = [f"{row['MiB each']:.0f} MiB", *copies, f"{row['asked to used s']:.1f} s"]
    return markdown(["bytes", "copied into the buffers", "copied out of them", "from `Ask` to use"], [cells], texts=0)


def conditions(report: Row) -> str:
    """Return the sentences that describe the run and the machine."""
    machine = report["machine"]
    said = "; ".join(report["notes"])
    where = f"{machine['cpu']}, torch {machine['torch']}, load {machine['load']:.1f} at the end, {machine['date']}"
    return f"{said[0].upper()}{said[1:]}. {where} ([handover.json](handover.json))."


def filled(page: str, report: Row) -> str:
    """Return the page with this run's tables."""
    rows = report["rows"]
    tables = {"gaps": gaps(rows), "all gaps": all_gaps(rows), "costs": costs(rows)}
    tables |= {"conditions": conditions(report), "transfer": transfer(report["more"][0])}
    for name, text in tables.items():
        page = fill(page, name, text)
    return page


def files() -> dict[Path, str]:
    """Return the text that the page should have."""
    return {PAGE: filled(PAGE.read_text(encoding="utf-8"), json.loads(RUN.read_text(encoding="utf-8")))}
