"""Course machinery. Puts a run of `bench.py handover --json FILE` into the tables of lesson 19's page.

The numbers between the page's comments `begin` and `end` come from that file and from nowhere else.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.pages.generated import fill

PAGE = ROOT / "lessons" / "l19_handover" / "README.md"
NAMES = {
    "no chunks": "in one step each",
    "chunks of 512": "in chunks of 512",
    "chunks of 128": "in chunks of 128",
    "hand-over": "by a prefill worker",
}
Row = dict[str, Any]


def ms(value: float) -> str:
    """Return milliseconds with as many digits as can be trusted."""
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def gaps(rows: list[Row]) -> str:
    """Return the table of the page's beginning: one process."""
    head = ["| the prompts are computed | gap, p50 | p99 | largest | first token of a prompt |"]
    return "\n".join([*head, "| --- | ---: | ---: | ---: | ---: |", *map(gap_row, rows[:-1])])


def gap_row(row: Row) -> str:
    cells = NAMES[row["prompts"]], ms(row["p50 ms"]), f"**{ms(row['p99 ms'])}**", ms(row["max ms"])
    return f"| {' | '.join(cells)} | {row['first s']:.2f} s |"


def all_gaps(rows: list[Row]) -> str:
    """Return the table with hand-over."""
    head = (
        "| the prompts are computed | between prompts, p50 | meanwhile, p50 | p99 | over turns | largest | tokens/s |"
    )
    lines = [head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        over = f"{ms(row['from'])} … {ms(row['to'])}"
        middle = ms(row["idle ms"]), ms(row["p50 ms"]), f"**{ms(row['p99 ms'])}**", over, ms(row["max ms"])
        lines.append(f"| {' | '.join([NAMES[row['prompts']], *middle])} | {row['tokens/s']:.0f} |")
    return "\n".join(lines)


def transfer(row: Row) -> str:
    """Return the table of transfers."""
    cells = (
        f"{row['MiB each']:.0f} MiB",
        ms(row["copy in ms"]),
        ms(row["copy out ms"]),
        f"{row['asked to used s']:.1f} s",
    )
    lines = [
        "| bytes | copied into the buffers | copied out of them | from `Ask` to use |",
        "| ---: | ---: | ---: | ---: |",
    ]
    return "\n".join([*lines, f"| {' | '.join(cells)} |"])


def conditions(report: Row) -> str:
    """Return the sentences that say what was run, and where."""
    machine = report["machine"]
    said = "; ".join(report["notes"])
    where = f"{machine['cpu']}, torch {machine['torch']}, load {machine['load']:.1f} at the end"
    return f"{said[0].upper()}{said[1:]}. {where}."


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="from python scripts/bench.py handover --json FILE")
    report = json.loads(parser.parse_args(argv).file.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    tables = {
        "gaps": gaps(report["rows"]),
        "conditions": conditions(report),
        "all gaps": all_gaps(report["rows"]),
        "transfer": transfer(report["more"][0]),
    }
    for name, text in tables.items():
        page = fill(page, name, text)
    PAGE.write_text(page, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
