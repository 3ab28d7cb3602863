"""Course machinery. Writes lessons/seen-on.md from the reports in lessons/reports.

A report in `authors` was made by the course's authors, one in `readers` was sent by a reader; the report itself cannot
tell. One that does not pass is an error here, so it cannot get a row.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT
from scripts.machine.page import figure
from scripts.machine.schema import Comparison, Report, Speed
from scripts.machine.stored import has_stopped, read, why_not
from scripts.pages.generated import fill

PAGE = ROOT / "lessons" / "seen-on.md"
REPORTS = ROOT / "lessons" / "reports"
BY = {"authors": "measured", "readers": "reported"}
TRITON, CAPTURED = "Triton kernels", "captured steps"
ARM = ("arm64", "aarch64")
MARKDOWN = "\\`*_{}[]<>()#+!|~&$:"


class Stored(NamedTuple):
    """A report in the repository, and its maker: a key of BY."""

    path: Path
    by: str
    report: Report


class Way(NamedTuple):
    """Code that runs only on some machines: its state without one, and a test of whether a report shows it."""

    name: str
    without: str
    shows: Callable[[Report], bool]


def on_gpu(report: Report, numbers: Sequence[int] | None = None) -> bool:
    """Return True if lessons, or these lessons, ran on a GPU in a report whose tokens are all equal."""
    lessons = [lesson for lesson in report.lessons if lesson.device.startswith("cuda")]
    return bool(lessons) and (numbers is None or set(numbers) <= {lesson.number for lesson in lessons})


def kernel_ok(name: str) -> Callable[[Report], bool]:
    """Return a test of whether a kernel is right in a report."""
    return lambda report: any(one.name == name and one.status == "ok" for one in report.kernels)


def with_fused(report: Report) -> bool:
    """Return True if decode steps with lesson 10's fused layers gave the tokens of torch's operations at least once."""
    return any(one.first == TRITON and one.status == "ok" and one.equal for one in report.comparisons)


def on_cpu(names: tuple[str, ...], report: Report) -> bool:
    return report.machine.architecture in names and kernel_ok("attention: cpu")(report)


PATHS = (
    Way("C++ kernels on x86-64", "never run", lambda report: on_cpu(("x86_64", "amd64"), report)),
    Way("C++ kernels on ARM", "never run", lambda report: on_cpu(ARM, report)),
    Way("Lessons on an NVIDIA GPU", "never run", on_gpu),
    Way("Captured steps, lesson 10", "never run", lambda report: on_gpu(report, [10])),
    Way("Triton: attention, lesson 3", "compiled", kernel_ok("attention: triton")),
    Way("Triton: layers, lesson 10", "compiled", with_fused),
    Way("Triton: windows, lesson 15", "compiled", kernel_ok("window: triton")),
    Way("Triton: int8 rows, lesson 17", "compiled", kernel_ok("int8: triton")),
    Way("Triton: int4 rows, lesson 17", "compiled", kernel_ok("int4: triton")),
)


def stored(folder: Path = REPORTS) -> list[Stored]:
    """Return the reports, the authors' first, then by their time.

    Raises:
        UserError: a file is not a report.
        ValueError: a report does not pass, or is in another folder; the message names it.
    """
    found = []
    for path in sorted(folder.rglob("*.json")):
        if path.parent.parent != folder or path.parent.name not in BY:
            raise ValueError(f"{path.name} belongs into one of {', '.join(BY)}")
        report = read(path)
        if why := why_not(report):
            raise ValueError(f"{path.parent.name}/{path.name} gets no row: {why}")
        found.append(Stored(path, path.parent.name, report))
    return sorted(found, key=lambda one: (list(BY).index(one.by), one.report.when))


def plain(text: str) -> str:
    """Return a stranger's text for a cell: no Markdown, no HTML, no links, one line."""
    line = " ".join("".join(sign for sign in text if sign.isprintable()).split())
    return "".join(f"&#{ord(sign)};" if sign in MARKDOWN else sign for sign in line)


def machines(found: Sequence[Stored]) -> str:
    """Return the table of the machines."""
    lines = [
        "| machine | report | lessons | decode at 1 | of memory | at 8 | at 32 | prefill at 8 | shared at 8 |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for one in found:
        report, machine = one.report, one.report.machine
        name = machine.gpu.name if machine.gpu else f"{machine.cpu}, {machine.cores} cores"
        dtype = f", {report.model.dtype}, {report.model.shape}" if report.model else ""
        day = f"[{BY[one.by]} {report.when[:10]}](reports/{one.by}/{one.path.name})"
        busy = "" if machine.load is None else f", load {machine.load:g}"
        cells = [plain(name + dtype + busy), f"{day}, commit {plain(machine.commit)}", count_of(report)]
        first = speed_at(report, "decode", 1)
        share = f"{100 * first.memory_share:.0f} %" if first and first.memory_share is not None else "–"
        cells += [rate(first), share, rate(speed_at(report, "decode", 8)), rate(speed_at(report, "decode", 32))]
        shared = speed_at(report, "shared beginning", 8)
        times = f"{figure(shared.times)} ×" if shared and shared.times is not None else "–"
        lines.append("| " + " | ".join([*cells, rate(speed_at(report, "prefill", 8)), times]) + " |")
    return "\n".join(lines)


def count_of(report: Report) -> str:
    """Return the number of lessons that gave all tokens, and of all lessons."""
    whole = sum(not has_stopped(lesson) for lesson in report.lessons)
    return str(whole) if whole == len(report.lessons) else f"{whole} of {len(report.lessons)}"


def speed_at(report: Report, load: str, at_once: int) -> Speed | None:
    """Return a speed that was measured; None otherwise."""
    right = (one for one in report.speeds if (one.load, one.at_once, one.status) == (load, at_once, "ok"))
    return next(right, None)


def rate(speed: Speed | None) -> str:
    return figure(speed.tokens_per_second) if speed else "–"


def gpus(found: Sequence[Stored]) -> str:
    """Return the table of comparisons on GPUs, or a sentence if there are none."""
    pairs = [(one, each) for one in found for each in one.report.comparisons if each.status == "ok"]
    if not pairs:
        return "No report of a GPU is here yet, so nothing is said of speeds on one."
    lines = ["| GPU | two ways | at once | ms | ms | times |", "| --- | --- | --: | --: | --: | --: |"]
    lines += [
        f"| {plain(gpu_of(one))} | {plain(ways(each))} | {each.at_once} | {figures(each)} |" for one, each in pairs
    ]
    return "\n".join(lines)


def gpu_of(one: Stored) -> str:
    return one.report.machine.gpu.name if one.report.machine.gpu else "none"


def ways(each: Comparison) -> str:
    return f"{each.first} / {each.second}"


def figures(each: Comparison) -> str:
    return " | ".join(map(figure, (each.first_ms, each.second_ms, each.times)))


def paths(found: Sequence[Stored]) -> str:
    """Return the table of what ran where: the authors' reports before the readers', otherwise the state without one."""
    lines = ["| what | state | seen on |", "| --- | --- | --- |"]
    for path in PATHS:
        shown = next((one for one in found if path.shows(one.report)), None)
        machine = shown.report.machine if shown else None
        where = (machine.gpu.name if machine.gpu and "x86" not in path.name else machine.cpu) if machine else "–"
        state = BY[shown.by] if shown else path.without
        lines.append(f"| {path.name} | *{state}* | {plain(where) if machine else where} |")
    return "\n".join(lines)


def page_text(page: str, found: Sequence[Stored]) -> str:
    """Return the page with its tables filled from the reports."""
    page = fill(page, "paths", paths(found))
    page = fill(page, "machines", machines(found))
    return fill(page, "gpus", gpus(found))


def files() -> dict[Path, str]:
    """Return the text that the page should have."""
    return {PAGE: page_text(PAGE.read_text(encoding="utf-8"), stored())}
