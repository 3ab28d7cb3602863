"""Lesson 20. The page's tables follow from the kept figures."""

import json

from scripts.bench.agents import PARTS
from scripts.bench.agents_load import crossing
from scripts.pages.agent_figures import RUN, TABLES, filled

import pytest


@pytest.fixture(scope="module")
def kept():
    return json.loads(RUN.read_text(encoding="utf-8"))


def test_every_kept_part_has_its_table(kept):
    page = "".join(f"<!-- begin: {name} -->\n<!-- end: {name} -->\n" for name in kept)
    for name in TABLES:
        part = filled(page, kept).partition(f"begin: {name} -->")[2].partition("<!-- end")[0]
        assert part.count("\n|") >= 3, f"the table of {name} has no rows"
        widths = {line.count("|") for line in part.splitlines() if line.startswith("|")}
        assert len(widths) == 1, f"the rows of {name} differ in their number of cells"


def test_parts_with_a_table_are_parts_of_the_suite():
    assert set(TABLES) <= set(PARTS)


def test_sessions_keep_nine_tenths_of_beladys_hits_at_every_load(kept):
    """The lesson's claim, in the figures that its page shows."""
    for row in kept["sessions"]["rows"]:
        if row["policy"] == "sessions":
            assert row["of Belady's %"] >= 90, f"{row['agents']} agents: {row}"


def test_hints_take_nothing_from_others(kept):
    """What a client's hints take from chats is what the same client takes without them; agents gain beside LRU."""
    for row in kept["neighbours"]["rows"]:
        assert row["chats, sessions"] >= row["chats, without its hints"] - 0.5, row
        assert row["agents, sessions"] >= row["agents, LRU"], row


def test_a_collapse_is_interpolated_between_two_loads():
    assert crossing([(10, 90.0), (20, 60.0), (30, 40.0)]) == 25
    assert crossing([(10, 90.0), (20, 60.0)]) is None


def test_figures_have_their_conditions(kept):
    for name, part in kept.items():
        assert part["rows"] and part["note"] and part["machine"]["date"], name
