"""Course machinery. Figures on pages are those of the code and of kept runs.

Protects readers from a figure that the code no longer gives, or that another run gave. Only figures are looked for,
with their units, and never the words around them.
"""

import json
import re
from functools import cache

from scripts import ROOT
from scripts.bench.allocator import placements

import pytest

from mini_engine.speculation.adapt import share_of_rows
from mini_engine.speculation.options import Speculation
from mini_engine.tiers.records import CRC, HEADER

LESSONS = ROOT / "lessons"


@cache
def page(folder: str) -> str:
    """Return a page's text, with its lines joined."""
    return " ".join((LESSONS / folder / "README.md").read_text(encoding="utf-8").split())


def gives(folder: str, *figures: str) -> None:
    """Assert that a page gives each figure, or each row of figures of a table."""
    for figure in figures:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d|[.,]\d)", page(folder)), (
            f"write {figure} in lessons/{folder}/README.md: that is what was just computed"
        )


def test_the_size_of_a_records_header_is_the_one_on_the_page():
    gives("l12_tiers", f"{HEADER.size} + {CRC.size} bytes")


def test_what_a_pool_can_place_is_what_lesson_2_says():
    rows = placements(2_000)  # what --quick measures
    anywhere, first, best = (f"{row['held when one finds no room, %']:.1f} %" for row in rows)
    gives("l2_token_flat", anywhere, first, best)
    assert rows[0]["of these, enough were free, %"] == 0, "with blocks anywhere, enough free blocks are always enough"
    assert all(row["of these, enough were free, %"] > 99 for row in rows[1:])


# ---------------------------------------------------------------- tables of engines, measured once and kept


def kept(path: str) -> list[dict]:
    """Return the rows of a bench's kept JSON."""
    return json.loads((LESSONS / path).read_text(encoding="utf-8"))["rows"]


def test_the_longest_gaps_on_the_pages_of_figures_are_lesson_19_s():
    first, *_, last = kept("l19_handover/handover.json")
    figures = f"{first['max ms']:,.0f} and {last['max ms']:.0f} ms"
    for path in ("README.md", "ladder/README.md"):
        assert figures in (LESSONS / path).read_text(encoding="utf-8")


@pytest.mark.parametrize(("first_s", "gap_ms", "met"), [(1, 100, "chunks of 128"), (2, 20, "hand-over")])
def test_each_pair_of_lesson_19_s_targets_is_met_by_one_way(first_s, gap_ms, met):
    rows = kept("l19_handover/handover.json")
    assert [row["prompts"] for row in rows if row["first s"] < first_s and row["p99 ms"] < gap_ms] == [met]
    gives("l19_handover", f"{first_s} s and", f"{gap_ms} ms")


def test_what_lesson_20_says_of_40_agents_and_of_belady_is_what_was_measured():
    rows = json.loads((LESSONS / "l20_agents/agents.json").read_text(encoding="utf-8"))["sessions"]["rows"]
    hits = {(int(row["agents"]), row["policy"]): row["hits %"] for row in rows}
    gives(
        "l20_agents", f"40 agents find {hits[40, 'sessions']:.0f} % of their prompts instead of {hits[40, 'LRU']:.0f} %"
    )
    gives("l20_agents", f"{hits[24, 'SLRU']:.0f} % instead of {hits[24, 'LRU']:.0f}")
    assert all(row["of Belady's %"] > 95 for row in rows if row["policy"] == "sessions"), "the page says so"


def test_a_step_has_as_many_drafts_as_lesson_14_says():
    gives("l14_speculation", f"{share_of_rows(Speculation().max_rows, 1)} drafts")
