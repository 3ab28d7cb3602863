"""Course machinery. The small calculators of lessons 2, 9 and 12 give what the lessons' own code gives."""

import json
import math
import random
import re

from scripts import ROOT
from scripts.website.browser import DESKTOP, PHONE, visiting

import pytest
import torch

from mini_engine.config import Qwen3Config
from mini_engine.kv.token_flat import pool_slots
from mini_engine.tiers.break_even import BreakEven
from tests.course.test_site import ALL_RULES, AXE, RUN_AXE

PAGES = {
    "pool": "l2_token_flat/README.md",
    "roofline": "l9_speed/README.md",
    "break-even": "l12_tiers/README.md",
}
WORK = "([tool, values]) => values.map(one => KvTools[tool].work(one))"


@pytest.fixture
def work(site_http, browser):
    """Return a function (tool, values) that computes in the page."""
    with visiting(browser, site_http) as visitor:

        def compute(tool: str, values: list[dict]) -> list[dict]:
            visitor.page.goto(site_http.url(PAGES[tool]))
            return visitor.page.evaluate(WORK, [tool, values])

        yield compute
        assert not visitor.complaints


def test_the_pool_s_size_is_pool_slots(work):
    chance, dtypes = random.Random(0), {"bfloat16": torch.bfloat16, "float32": torch.float32}
    drawn = [
        {
            "layers": chance.randint(1, 80),
            "heads": chance.randint(1, 16),
            "dim": chance.choice([64, 80, 128]),
            "dtype": chance.choice(list(dtypes)),
            "gib": chance.randint(1, 80),
            "block": chance.choice([1, 8, 16, 24]),
            "tokens": 100,
        }
        for _ in range(50)
    ]
    for given, got in zip(drawn, work("pool", drawn), strict=True):
        config = Qwen3Config(1, 1, 1, given["layers"], given["heads"], given["heads"], given["dim"])
        expected = pool_slots(config, dtypes[given["dtype"]], given["gib"] * 2**30, given["block"])
        assert got["slots"] == expected and got["blocks"] == expected // given["block"], given
        assert got["requests"] == got["blocks"] // -(-100 // given["block"])


def test_the_break_even_is_the_lesson_s(work):
    chance = random.Random(1)
    drawn = [
        {
            "rate": chance.randint(10, 20_000),
            "token": chance.randint(1, 256),
            "bandwidth": chance.randint(1, 5_000),
            "latency": chance.choice([0, 5, 50]),
            "prefix": chance.randint(1, 9_000),
        }
        for _ in range(50)
    ]
    lengths = []
    for given, got in zip(drawn, work("break-even", drawn), strict=True):
        tier = BreakEven(given["rate"], given["token"] * 1024, given["bandwidth"] * 1e6, given["latency"] / 1e3)
        lengths.append(tier.num_tokens)
        assert math.isclose(got["from"], tier.num_tokens, rel_tol=1e-9), given
        assert (got["back"] <= got["again"]) == tier.pays(given["prefix"]), given
    assert math.inf in lengths and min(lengths) < math.inf


def test_the_roofline_is_the_one_that_was_measured(work):
    report = json.loads((ROOT / "lessons" / "l9_speed" / "step.json").read_text(encoding="utf-8"))
    speeds = dict(re.findall(r"(\d+) at once: memory is read at ([\d.]+)", "\n".join(report["notes"])))
    matrix = report["machine"]["matrix_gflop_s"]["bfloat16"]
    rows = [row for row in report["rows"] if row["part"] == "whole step"]
    drawn = [
        {"batch": int(batch), "read": float(speeds[batch]), "matrix": matrix, "weights": 1.192, "history": 256}
        for batch in (row["step"].split()[0] for row in rows)
    ]
    for row, got in zip(rows, work("roofline", drawn), strict=True):
        assert math.isclose(got["seconds"] * 1e3, row["limit, ms"], rel_tol=0.04), row["step"]


@pytest.mark.parametrize("tool", PAGES)
def test_a_tool_answers_when_it_is_changed_and_is_accessible(tool, site_http, browser):
    with visiting(browser, site_http, reduced_motion="reduce") as visitor:
        page = visitor.page
        for width in (DESKTOP, PHONE):
            page.set_viewport_size({"width": width, "height": 844})
            page.goto(site_http.url(PAGES[tool]))
            room = page.locator(f".kv-tool[data-tool={tool}]")
            before = room.locator("dl").inner_text()
            assert "NaN" not in before and "undefined" not in before
            room.locator("input").first.fill("2")
            assert room.locator("dl").inner_text() != before
            box = room.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
        page.evaluate(AXE.read_text(encoding="utf-8"))
        assert not page.evaluate(RUN_AXE, ALL_RULES)
        assert not visitor.complaints


def test_without_scripts_there_is_no_empty_box(site_http, browser):
    with visiting(browser, site_http, java_script_enabled=False) as visitor:
        visitor.page.goto(site_http.url(PAGES["pool"]))
        box = visitor.page.locator(".kv-tool").bounding_box()
        assert box is None or box["height"] == 0
