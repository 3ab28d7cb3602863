"""Course machinery. Every table fits the terminal and loses neither a name nor a figure: at 60, 80, 120, in a pipe."""

import ast
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout

from scripts import ROOT, batch_invariance, l7_load, long_prompt, show_bytes, smoke_all
from scripts.bench.command import suites
from scripts.bench.common import Report
from scripts.website.report import print_rows

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
FIGURE, COUNT, PERCENT = 123456.7, 12_345_678, 99.9
# The widest rows that a suite can print, at least as wide as any that it printed while the course was written.
WORST = {
    "admission": {"promised": "known tokens, half a block per running request", "steps": FIGURE, "most running": FIGURE,
                  "preemptions": FIGURE, "most of one request": FIGURE, "computed again, %": FIGURE},
    "allocator": {"allocator": "lesson 8, counted", "blocks in the pool": COUNT, "µs": FIGURE, "best": 0.0123,
                  "± %": PERCENT},
    "block_size": {"block size": 128, "blockwise ms": FIGURE, "cpu ms": FIGURE, "slots empty %": PERCENT},
    "timing": {"the second client sends": "the same prompt, with a salt of its own", "ms": FIGURE,
               "cached tokens": 2048},
    "compiled": {"kernel": "decode, 64 sequences of 4,096, chunks of 256", "target": "sm_100", "tile": "128 x 128",
                 "warps": 8, "regs": 255, "spilled": 1024, "KiB": 227.5, "MB": FIGURE, "Gflop": FIGURE,
                 "H100 us": FIGURE},
    "compiled, a layer": {"in a layer": "norm, RoPE, store", "times": 2, "target": "sm_100", "warps": "8",
                          "regs": "255", "spilled": "1024", "KiB": "227.50", "MB": FIGURE, "H100 us": FIGURE},
    "grammar": {"vocabulary": "padded to Qwen3's", "what": "no row has a grammar", "ms": FIGURE, "best": FIGURE,
                "± %": PERCENT},
    "hybrid": {"part": "decode", "case": "copy_states, 1234.5 MiB", "ours tokens/s": FIGURE,
               "transformers tokens/s": FIGURE, "times": FIGURE, "memory limit tokens/s": FIGURE,
               "of the limit %": PERCENT},
    "hybrid, a step": {"part": "step", "case": "128 sequences", "CPU ms": FIGURE, "feed-forward ms": FIGURE,
                       "delta nets ms": FIGURE, "other matrices ms": FIGURE, "else ms": FIGURE,
                       "the rule alone ms": FIGURE, "memory limit ms": FIGURE},
    "kernel": {"contender": "scaled_dot_product_attention, padded", "ms": FIGURE,
               "best": FIGURE, "± %": PERCENT, "× gather": FIGURE, "% of memory": PERCENT, "GB/s": FIGURE},
    "kv_dtype": {"part": "attention", "what": "8 sequences of 32,768 tokens: bfloat16", "bytes a token": COUNT,
                 "tokens per GiB": COUNT, "ms": FIGURE, "± %": PERCENT, "×": FIGURE},
    "ladder": {"lesson": "3 block tensor, paged", "new tokens/s": FIGURE, "± %": PERCENT, "× before": FIGURE,
               "first token, s": FIGURE, "at once": FIGURE, "KV held, MiB": FIGURE, "KiB a request": FIGURE,
               "waste %": PERCENT, "prefill tokens": COUNT},
    "launch": {"sequences": 128, "model": "28 layers, nothing to compute", "step": "padded and replayed",
               "operations": COUNT, "ms": FIGURE, "best": FIGURE, "± %": PERCENT},
    "loop": {"lesson": "2 token-flat", "tokens so far": 1024, "ms a step": FIGURE, "± %": PERCENT,
             "times its step at 64": FIGURE},
    "parallel": {"step": "a prompt of 2,048 tokens", "run by": "2 ranks of 1 thread",
                 "ms a step": FIGURE, "± %": PERCENT, "×": FIGURE},
    "parallel, the exchange": {"step": "a prompt of 2,048 tokens", "all-reduces": FIGURE,
                               "bytes": FIGURE, "theory": COUNT, "share": FIGURE, "µs a call": FIGURE},
    "peers": {"load": "64 requests of mixed lengths", "engine": "transformers generate_batch", "tokens/s": FIGURE,
              "lowest": FIGURE, "highest": FIGURE, "ours is ×": FIGURE, "% of memory": PERCENT},
    "prefill_parts": {"part": "rest of the model", "ms": FIGURE, "± %": PERCENT, "% of step": PERCENT,
                      "oneDNN, ms": FIGURE, "× oneDNN": FIGURE},
    "prefix": {"load": "shared beginning", "contender": "transformers, continuous batching", "seconds": FIGURE,
               "times ours": FIGURE, "to first token, s": FIGURE, "times ours ": FIGURE, "prefill tokens": COUNT,
               "± %": PERCENT, "answers as ours": "128/128"},
    "replicas": {"router": "sglang-router round_robin", "found %": PERCENT, "max / mean load": FIGURE,
                 "TTFT p50 ms": FIGURE, "TTFT p99 ms": FIGURE, "requests/s": FIGURE},
    "routers": {"router": "sglang-router round_robin", "cached %": PERCENT, "max / mean": FIGURE},
    "routing": {"replicas": "64 x 100,000", "policy": "smallest tree, imbalance", "found %": PERCENT,
                "max / mean load": FIGURE, "TTFT p50 s": FIGURE, "TTFT p99 s": FIGURE},
    "rows": {"what": "a lookup that finds nothing", "ms": FIGURE, "x": FIGURE},
    "sampler": {"of": "sampler", "what": "one with top-p, others greedy", "ms": FIGURE, "best": FIGURE,
                "± %": PERCENT},
    "scheduler": {"by": "blocks in the pool, for 64", "number": COUNT, "µs, scheduler": FIGURE, "best": FIGURE,
                  "µs a request": FIGURE, "µs, all but the model": FIGURE, "± %": PERCENT},
    "serve": {"contender": "transformers generate, padded", "seconds": FIGURE, "new tokens/s": FIGURE,
              "times ours": FIGURE, "answers as ours": "128/128", "± %": PERCENT},
    "speculation": {"load": "answer from a document, again", "engine": "16 at once, speculating, the tree too",
                    "tokens a step": FIGURE, "tokens/s": FIGURE, "± %": PERCENT, "× lesson 9": FIGURE},
    "speculation, counted": {"load": "pocket: the same question again", "k": 8, "tokens": COUNT, "steps": COUNT,
                             "guesses": COUNT, "accepted": COUNT, "accepted, %": PERCENT, "tokens a step": FIGURE},
    "step": {"step": "64 at once, packed", "part": "rest of the engine", "ms": FIGURE, "± %": PERCENT,
             "% of step": PERCENT, "limit, ms": FIGURE, "% of limit": PERCENT},
    "tiers": {"part": "compact", "case": "a prompt of 4,096 tokens from the disk, opened anew", "ms": FIGURE,
              "times": FIGURE, "also": "1,234.5 MiB in 12,345 records, ± 12 %"},
    "tiers, the line": {"tier": "host", "MB/s": FIGURE, "ms to first byte": FIGURE, "tokens/s computed": FIGURE,
                        "KiB a token": FIGURE, "wins above MB/s": FIGURE, "from tokens": COUNT},
    "trace": {"blocks": "100,000", "lru %": PERCENT, "lfu %": PERCENT, "fifo %": PERCENT, "longest first %": PERCENT,
              "tier %": PERCENT},
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


def test_every_suite_has_its_widest_rows_here():
    known = {name.partition(",")[0] for name in WORST}
    assert known - {"prefill_parts"} == set(suites()), "a suite's table is not tested"
    for name, row in WORST.items():
        folder, suite = ROOT / "scripts/bench", name.partition(",")[0]
        trees = [ast.parse(path.read_text("utf-8")) for path in (*folder.glob(f"{suite}*.py"), folder / "turns.py")]
        texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        told = [title for title in row if title not in texts and not title.startswith("times its")]
        assert not told or name in ("trace", "grammar", "peers", "block_size"), f"{name}.py has no column {told}"


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
    task = Task(12, LONG, (), 1, (), ())
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
    row = {"page": "l3_block_tensor/README.md", "a": 12345.6, "b": 1234.5, "c": 1234}
    has_all(said(print_rows, [row], width=width), ["kB without fonts", "first paint, ms"], ["12345.6", "1234"], width)
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
