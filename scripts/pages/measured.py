"""Course machinery. Writes the tables of pages 7, 9, 15, 16 and 17, and of the families, from runs that are kept.

`bench.py scoreboard` keeps a run as a JSON file beside its page, where the table stands between two comments of the
table's name. Without the file, the table that stands there stays.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT
from scripts.pages import measured_engines as engines
from scripts.pages import measured_models as models
from scripts.pages.generated import fill
from scripts.pages.measured_cells import Row

LESSONS = ROOT / "lessons"


class Table(NamedTuple):
    """A block of a page, written from a kept run."""

    file: str
    name: str
    write: Callable[[Row], str]
    page: str = "README.md"  # beside the file


TABLES = (
    Table("l7_server/serving.json", "servers", engines.servers),
    Table("l7_server/serving-limits.json", "server limits", engines.servers),
    Table("l9_speed/peers.json", "engines", engines.engines),
    Table("l9_speed/peers.json", "versions", engines.versions),
    Table("l9_speed/behind.json", "behind", engines.engines),
    Table("l9_speed/shared.json", "shared", engines.shared_steps),
    Table("l9_speed/prefill.json", "prefill", engines.prefill_step),
    Table("l9_speed/step.json", "steps before", engines.steps_before),
    Table("l9_speed/step.json", "steps after", engines.steps_after),
    Table("l15_windows/windows.json", "requests", models.requests_with_windows),
    Table("l15_windows/histories.json", "histories", models.decode_with_windows),
    Table("l16_latents/latents.json", "reading", models.latents_read),
    Table("l16_latents/latents.json", "steps", models.latents_steps),
    Table("l17_bits/kv_dtype.json", "attention", models.bits_read),
    Table("l17_bits/methods.json", "methods", models.methods),
    Table("families.json", "families", models.families, "what-models-keep.md"),
)


def files() -> dict[Path, str]:
    """Return the text that each page should have."""
    pages: dict[Path, str] = {}
    for table in TABLES:
        kept = LESSONS / table.file
        if kept.is_file():
            page = kept.with_name(table.page)
            report = json.loads(kept.read_text(encoding="utf-8")) | {"file": table.file}
            pages[page] = fill(pages.get(page) or page.read_text(encoding="utf-8"), table.name, table.write(report))
    return pages
