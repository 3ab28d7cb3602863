"""Course machinery. The page of reports: a row for each that passes, and nothing said of a machine that none shows.

Protects readers from a claim about a GPU that nobody tried, and the page from what a stranger may put into a report.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path

from scripts.machine.schema import Report
from scripts.pages import seen_on

import pytest
from markdown import Markdown

from tests.course.reports import T4, machine, report


def put(folder: Path, by: str, one: Report, name: str = "one.json") -> None:
    path = folder / by / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(one)), encoding="utf-8")


def states(found) -> dict[str, str]:
    """Return what the table of paths says of each."""
    return dict(re.findall(r"^\| (.*?) \| \*(.*?)\* \|", seen_on.paths(found), re.MULTILINE))


def test_without_reports_nothing_has_run():
    assert set(states([]).values()) == {"never run", "compiled"}
    assert "No report of a GPU" in seen_on.gpus([])


def test_a_report_of_a_cpu_says_nothing_of_gpus(tmp_path):
    put(tmp_path, "readers", report())
    found = states(seen_on.stored(tmp_path))
    assert found.pop("C++ kernels on x86-64") == "reported"
    assert set(found.values()) == {"never run", "compiled"}


def test_a_report_of_a_gpu_shows_what_ran_and_by_whom(tmp_path):
    put(tmp_path, "readers", report(T4))
    found = seen_on.stored(tmp_path)
    assert states(found).pop("C++ kernels on ARM") == "never run"
    assert list(states(found).values()).count("reported") == 8
    assert "Tesla T4" in seen_on.machines(found) and "float16" in seen_on.machines(found)
    assert "captured steps / eager steps" in seen_on.gpus(found)
    put(tmp_path, "authors", report(T4, when="2026-12-01T00:00:00Z"), "two.json")
    assert states(seen_on.stored(tmp_path))["Triton: int8 rows, lesson 17"] == "measured", (
        "the authors' reports come first"
    )


def test_a_part_that_did_not_run_is_not_claimed(tmp_path):
    one = report(T4)
    for kernel in one.kernels:
        if kernel.name == "window: triton":
            kernel.status, kernel.why = "left out", "Triton cannot be imported"
    one.comparisons = []
    put(tmp_path, "readers", one)
    found = states(seen_on.stored(tmp_path))
    assert found["Triton: windows, lesson 15"] == found["Triton: layers, lesson 10"] == "compiled"
    assert found["Triton: attention, lesson 3"] == "reported"


def test_a_report_that_does_not_pass_gets_no_row(tmp_path):
    put(tmp_path, "readers", report(quick=True))
    with pytest.raises(ValueError, match=r"readers/one\.json gets no row: it was made with --quick"):
        seen_on.stored(tmp_path)


def test_a_report_belongs_to_authors_or_readers(tmp_path):
    put(tmp_path, "friends", report())
    with pytest.raises(ValueError, match="belongs into"):
        seen_on.stored(tmp_path)


ATTACKS = [
    "<script>alert(1)</script>", "[a](javascript:x)", "![x](http://evil/x.png)", "a | b\n| c |", "`code` **b**",
    "&lt;b&gt;", "http://evil.example", "\u202ebackwards", "<!-- end: machines -->",
]  # fmt: skip


@pytest.mark.parametrize("text", ATTACKS)
def test_a_stranger_s_text_is_only_text(text, tmp_path):
    put(tmp_path, "readers", report(machine=machine(cpu=text, commit=text)))
    table = seen_on.machines(seen_on.stored(tmp_path))
    assert len(table.splitlines()) == 3
    html = Markdown(extensions=["tables"]).convert(table)
    tags = set(re.findall(r"</?([a-z]+)", html))
    assert tags <= {"table", "thead", "tbody", "tr", "th", "td", "a"} and html.count("<a ") == 1
    assert "evil" not in " ".join(re.findall(r'(?:href|src)="(.*?)"', html)) and "\u202e" not in html
