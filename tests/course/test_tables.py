"""Course machinery. Every table fits the terminal and loses neither a name nor a figure: at 60, 80, 120, in a pipe.

Protects readers of a check, a smoke run or a benchmark from a figure that is cut off or broken over two lines.
"""

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout

from scripts import ROOT, batch_invariance, l7_load, long_prompt, show_bytes, smoke_all
from scripts.bench.common import Report

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from lessons._course.catalog import Task, read_lessons
from lessons._course.compare import Row
from lessons._course.doctor import PACKAGES, Finding
from lessons._course.places import Places
from lessons._course.progress import Entry
from lessons._course.report import Report as CheckReport
from lessons._course.report import SmokeReport, TaskReport, TestResult
from lessons._course.show import View
from lessons._course.tables import Column, show

WIDTHS = (60, 80, 120)
LESSONS = read_lessons(Places.find())
LONG = "One that is still to be written, with the longest title that there is"
MACHINE = {"cpu": "a processor", "threads": 16, "torch": "2.13.0", "commit": "0123456789", "dirty": True}
FIGURE, PERCENT = 123456.7, 99.9
# The widest rows of three suites: many columns of figures, two columns of text, a long last column.
WORST = {
    "compiled": {"kernel": "decode, 64 sequences of 4,096, chunks of 256", "target": "sm_100", "tile": "128 x 128",
                 "warps": 8, "regs": 255, "spilled": 1024, "KiB": 227.5, "MB": FIGURE, "Gflop": FIGURE,
                 "H100 us": FIGURE},
    "routing": {"replicas": "64 x 100,000", "policy": "smallest tree, imbalance", "found %": PERCENT,
                "max / mean load": FIGURE, "TTFT p50 s": FIGURE, "TTFT p99 s": FIGURE},
    "tiers": {"part": "compact", "case": "a prompt of 4,096 tokens from the disk, opened anew", "ms": FIGURE,
              "times": FIGURE, "also": "1,234.5 MiB in 12,345 records, ± 12 %"},
}  # fmt: skip


def lines_of(text: str, width: int) -> list[str]:
    lines = text.splitlines()
    wide = [line for line in lines if cell_len(line.rstrip()) > width]
    assert not wide, f"wider than {width}: {wide}"
    return lines


def has_all(text: str, names, figures, width: int) -> None:
    """Every figure stands whole in a line, every word of a name somewhere, and nothing is left out for dots."""
    lines = lines_of(text, width)
    assert "…" not in text, f"something was cut:\n{text}"
    parts = [part for line in lines for part in re.split(r"\s{2,}", line.strip())]
    for figure in figures:
        assert str(figure) in " ".join(parts).split() or str(figure) in parts, f"{figure} is missing:\n{text}"
    words = " ".join(lines)
    for name in names:
        missing = [word for word in name.split() if word not in words]
        assert not missing, f"of {name!r}, {missing} is missing:\n{text}"


def printed(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False)


def said(function, *arguments, width: int) -> str:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("COLUMNS", str(width))
        function(*arguments)
    return out.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", WORST)
def test_a_suites_table(name, width):
    row = WORST[name]
    text = said(Report(name, [row, row], machine=MACHINE).show, width=width)
    figures = [f"{v:.0f}" if isinstance(v, float) and v >= 100 else str(v) for v in row.values() if type(v) is not str]
    table = text.split("measured\n", 1)[1]  # the headlines are sentences
    has_all(table, [*row, *(value for value in row.values() if isinstance(value, str))], figures, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_with_other_columns_begin_a_table_of_their_own(width):
    rows = [{"part": "memory", "MiB": 1.5}, {"part": "decode", "tokens/s": 250.0, "times": 2.0}]
    text = said(Report("hybrid", rows, machine=MACHINE).show, width=width).split("measured\n", 1)[1]
    first, second = (line.split() for line in text.splitlines() if "part" in line)
    assert first == ["part", "MiB"] and second == ["part", "tokens/s", "times"]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_of_all_smoke_scripts(width):
    kv = {"layout": "block-tensor over 2 ranks", "bytes": 134_217_728}
    report = {"match": True, "requests": [{"ours": [1] * 1200, "hf": [1] * 1200}], "kv": kv}
    report["seconds"] = {"ours": 0.1, "hf": 100.0}
    results = [smoke_all.Result(lesson, 0, 1.0, "", report) for lesson in LESSONS]
    text = said(smoke_all.print_results, results, width=width)
    table = text.rpartition("Every token")[0]
    names = [f"{lesson.number} {lesson.title}" for lesson in LESSONS]
    has_all(table, [*names, kv["layout"]], ["1200/1200", "12,000", "12", "134,217,728"], width)
    if width >= 80:
        assert len(re.findall("^lesson ", table, re.MULTILINE)) == 1, "one table is enough"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_list_of_lessons(width):
    done = Entry(started="2026-11-23", passed="2026-11-23", not_checked=["a", "b"])
    console = printed(width)
    View(console).overview(LESSONS, {lesson.id: done for lesson in LESSONS})
    numbers = [str(lesson.minutes) for lesson in LESSONS] + [str(lesson.number) for lesson in LESSONS]
    text = console.file.getvalue()
    has_all(text, [lesson.title for lesson in LESSONS] + ["passed 2026-11-23, 2 NOT CHECKED"], numbers, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_of_a_whole_check(width):
    tests = [TestResult(f"tests/l19/test_{i}.py::test", "passed") for i in range(12)]
    tests.append(TestResult("tests/l19/test_x.py::test", "skipped", "needs an NVIDIA GPU with 16 GiB"))
    task = Task(12, LONG, (), 1, ())
    report = CheckReport(LESSONS[14], tests, [TaskReport(task, "NOT CHECKED", tests)])
    report.smoke = SmokeReport("NOT CHECKED", "tasks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 are not written")
    console = printed(width)
    View(console).report(report)
    skipped = ["all tests", "tokens", report.smoke.text, "NOT CHECKED", "1 test: needs an NVIDIA GPU with 16 GiB"]
    has_all(console.file.getvalue(), [LONG, "12 of its 13 tests passed", *skipped], ["12"], width)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_the_doctor_finds(width):
    found = [Finding(name, "missing", f"not installed: {without}. Read more.") for name, without in PACKAGES.items()]
    found.append(Finding("the reference", "note", f"mini_engine/{'a_folder/' * 12}file.py changed"))
    console = printed(width)
    View(console).findings(found)
    text = console.file.getvalue()
    names = [f"{one.name} {one.state}" for one in found] + [one.text for one in found[:-1]]
    has_all(text, names, [], width)
    assert found[-1].text.partition(" ")[0] in re.sub(r"\s", "", text), "a long path is broken, but whole"


@pytest.mark.parametrize("width", WIDTHS)
def test_two_columns_of_code(width):
    mine, reference = (
        "taken = [self.free_blocks.pop() for _ in range(n)]",
        "return self.free_blocks[cut:][::-1] if n else []",
    )
    console = printed(width)
    View(console).columns([Row("gap", "line 5", "line 7"), Row("changed", mine, reference)], "work/l2/allocator.py")
    text = console.file.getvalue()
    has_all(text, ["yours: work/l2/allocator.py", "reference", "line 5", "line 7", mine, reference], [], width)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_tables_of_single_scripts(width, capsys):
    times = {"largest_gap_steps": 12, "largest_gap_ms": 12_345.6, "usual_gap_ms": 123.4, "first_token_ms": 123_456.7}
    text = said(long_prompt.print_reports, {"chunks, 1024 tokens a step": times}, width=width)
    names = ["chunks, 1024 tokens a step", "largest gap", "usual gap", "wait for first token"]
    has_all(text, names, ["12 step, 12346 ms", "123 ms", "123457 ms"], width)
    parts = {
        "the vocabulary head [1024, 151936]": [True, False] * 3,
        "a prompt in chunks, reference kernel": [True] * 6,
    }
    text = said(batch_invariance.print_report, {"bfloat16": parts}, width=width)
    has_all(text, [*parts, *(f"n = {n}" for n in batch_invariance.COUNTS)], ["equal", "no"], width)
    text = said(l7_load.print_speed, {"LLM.generate": 12_345.0, "HTTP, streamed": 1_234.0}, width=width)
    has_all(text, ["LLM.generate", "HTTP, streamed", "tokens/s"], ["12,345", "1,234", "10%"], width)
    text = said(show_bytes.main, ["naïve 😀 漢字 incomprehensibilities"], width=width)
    has_all(text, ["token id", "bytes", "streamed", "decoded alone", "'漢'", "'😀'"], [], width)


columns = st.builds(Column, st.text("ab cd/%", max_size=24).map(str.strip), st.booleans())


@given(st.data(), st.lists(columns, min_size=2, max_size=12), st.sampled_from(WIDTHS))
def test_no_table_loses_anything(data, columns, width):
    names, figures = (
        st.text("abc defg", min_size=1, max_size=40),
        st.from_regex(r"\d{1,3}(,\d{3}){0,3}", fullmatch=True),
    )
    columns = [Column("name", is_text=True), *columns]
    cells = [data.draw(names.filter(str.strip) if column.is_text else figures) for column in columns]
    console = printed(width)
    show(console, columns, [cells])
    by = [column.is_text for column in columns]
    texts = [cell for cell, is_text in zip(cells, by, strict=True) if is_text]
    long = [word for text in texts for word in text.split() if len(word) > 20]
    if not long:  # a word may be longer than its column; then it is broken
        has_all(console.file.getvalue(), texts, [c for c, is_text in zip(cells, by, strict=True) if not is_text], width)
    lines_of(console.file.getvalue(), width)


@pytest.mark.parametrize("command", [["-m", "lessons"], ["scripts/bench.py", "--help"]])
def test_in_a_pipe_a_table_is_80_columns_wide(command):
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    options = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    done = subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, env=environment | {"PYTHONUTF8": "1"}, check=True, **options
    )
    assert "…" not in done.stdout
    lines_of(done.stdout, 80)


def test_no_other_file_lays_out_a_table_of_its_own():
    for folder in ("lessons", "scripts", "mini_engine"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if path.name != "tables.py":
                assert "rich.table" not in text and "rich.columns" not in text, f"{path}: use lessons/_course/tables.py"
