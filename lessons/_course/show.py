"""Course machinery. Prints what the commands show: the list, a check's summary, a diff, the doctor's findings."""

from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from lessons._course.advice import Advice
from lessons._course.catalog import Lesson
from lessons._course.compare import Row
from lessons._course.messages import counted
from lessons._course.progress import Entry
from lessons._course.report import Failure, Report
from lessons._course.tables import Column, show
from lessons._course.tracks import Syllabus
from lessons._course.verdict import Verdict

if TYPE_CHECKING:
    from lessons._course.doctor import Finding

STYLES = {
    "done": "green",
    "equal": "green",
    "ok": "green",
    "passed": "green",
    "failing": "red",
    "differs": "red",
    "failed": "red",
    "missing": "red",
    "NOT CHECKED": "yellow",
    "not written": "yellow",
    "absent": "yellow",
    "note": "yellow",
}
OVERVIEW = [Column(), Column("Lesson", True), Column("Minutes"), Column("After", True), Column("Progress", True)]
TASKS = [Column(), *[Column(is_text=True)] * 3]
TOTALS = [Column(is_text=True)] * 2
FINDINGS = [Column(is_text=True, least=13), Column(is_text=True, least=7), Column(is_text=True)]  # shown one by one


def make_console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False)


class View:
    """Everything that is printed to one console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, text: str = "", style: str | None = None) -> None:
        """Print one line of plain text, never wrapped and never parsed as markup."""
        self.console.print(Text(text, style=style or ""), soft_wrap=True)

    def overview(self, syllabus: Syllabus, lessons: list[Lesson], entries: dict[str, Entry]) -> None:
        """Print the tracks, with a row for each lesson: its minutes, what it needs, how far the student is."""
        rows: list[list[str | Text]] = []
        for track in syllabus.tracks:
            own = track.of(lessons)
            hours = f"{sum(lesson.core_minutes for lesson in own) / 60:.1f} hours"
            if rows:
                rows.append(["", "", "", "", ""])
            rows.append(["", Text.assemble((track.title, "bold"), f": {hours}"), "", "", ""])
            rows += [lesson_row(lesson, entries[lesson.id]) for lesson in own]
        show(self.console, OVERVIEW, rows, keys=2, ruled=False)

    def report(self, report: Report) -> None:
        """Print each task, all tests, the tokens, and what was not checked."""
        tasks = []
        for entry in report.tasks:
            passed = sum(result.outcome == "passed" for result in entry.results)
            count = f"{passed} of its {counted(len(entry.results), 'test')} passed"
            tasks.append([str(entry.task.number), entry.task.title, styled(entry.state), count])
        show(self.console, TASKS, tasks, keys=2, ruled=False)
        self.line()
        smoke = report.smoke
        tokens = Text(smoke.text) if smoke.state == "equal" else styled(smoke.state).append(f"  {smoke.text}", "")
        rows = [["all tests", f"{report.count('passed')} of {len(report.results)} passed"], ["tokens", tokens]]
        rows += [["", styled("NOT CHECKED").append(f"  {line}", "")] for line in report.skipped]
        show(self.console, TOTALS, rows, ruled=False)
        self.line()

    def verdict(self, verdict: Verdict, verbose: bool = False, table: bool = False) -> None:
        """Print a check: what to do next and notes; with `table`, first what is known of each task."""
        if table and verdict.report.results:
            self.report(verdict.report)
        self.advice(verdict.advice, "bold green" if verdict.advice.is_good else "bold red")
        if verbose:
            self.failure(verdict.advice.failure)
        for note in verdict.notes:
            self.line()
            self.advice(note, "bold yellow")
        self.line(f"  ({verdict.report.seconds:.1f} s)", "dim")

    def failure(self, failure: Failure | None) -> None:
        """Print the failure that the advice is about in full, as Python shows it."""
        if failure:
            self.line()
            for path, line, name, text in failure.frames:
                self.line(f'  File "{path}", line {line}, in {name}')
                self.line(f"    {text}")
            for text in failure.text.splitlines():
                self.line("  " + text)

    def advice(self, advice: Advice, style: str = "bold red") -> None:
        self.line(advice.headline, style)
        for text in [advice.where, *advice.lines]:
            if text:
                self.line("  " + text)
        for command in advice.commands:
            self.line("  " + command, "cyan")

    def findings(self, findings: Iterable["Finding"]) -> bool:
        """Print each finding as it arrives. Return whether nothing was missing."""
        good = True
        for finding in findings:
            first, *more = finding.text.splitlines() or [""]
            show(self.console, FINDINGS, [[finding.name, styled(finding.state), first]], keys=2, ruled=False)
            for text in more:
                self.line("    " + text, "bold")
            good = good and finding.state != "missing"
        return good

    def code(self, source: str) -> None:
        """Print Python source: coloured on a terminal, plain in a pipe."""
        if self.console.is_terminal:
            from rich.syntax import Syntax

            self.console.print(Syntax(source, "python", background_color="default", word_wrap=True))
        else:
            self.line(source)

    def unified(self, lines: list[str]) -> None:
        styles = {"+": "green", "-": "red", "@": "cyan"}
        for text in lines:
            self.line(text, styles.get(text[:1]))

    def columns(self, rows: list[Row], name: str) -> None:
        """Print two columns: the student's lines and the reference's."""
        styles = {"equal": ("", ""), "gap": ("cyan", "cyan"), "changed": ("red", "green")}
        cells = [[Text(row.mine, styles[row.kind][0]), Text(row.reference, styles[row.kind][1])] for row in rows]
        show(self.console, [Column(f"yours: {name}", True), Column("reference", True)], cells, ruled=False)

    @contextmanager
    def running(self, lesson: Lesson):
        """Show a progress line while the tests run; yield the watcher for the check's events."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Bar(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            line = bar.add_task(f"Lesson {lesson.number}: starting", total=None)

            def take(event: dict) -> None:
                if event["event"] == "collected":
                    bar.update(line, total=len(event["tests"]), description=f"Lesson {lesson.number}: tests")
                elif event["event"] == "result":
                    bar.advance(line)
                elif event["event"] == "smoke":
                    bar.update(line, description=f"Lesson {lesson.number}: comparing tokens with Hugging Face")

            yield take


def styled(state: str) -> Text:
    return Text.assemble((state, STYLES.get(state, "")))


def lesson_row(lesson: Lesson, entry: Entry) -> list[str | Text]:
    minutes = str(lesson.core_minutes)
    if lesson.minutes > lesson.core_minutes:
        minutes += f"–{lesson.minutes}"
    needs = ", ".join(map(str, lesson.needs)) or "–"
    return [str(lesson.number), lesson.title, minutes, needs, progress_text(lesson, entry)]


def progress_text(lesson: Lesson, entry: Entry) -> Text:
    """Return "passed", "core passed", "2 of 5 tasks" or "not started", and how much was not checked."""
    if entry.passed:
        rest = f", {len(entry.not_checked)} NOT CHECKED" if entry.not_checked else ""
        return Text.assemble(("passed", "green"), f" {entry.passed}", (rest, "yellow"))
    if entry.core_passed:
        return Text.assemble(("core passed", "green"), f" {entry.core_passed}")
    if entry.started:
        known = {task.number for task in lesson.tasks}
        return Text(f"{len(known & set(entry.tasks_done))} of {len(lesson.tasks)} tasks")
    return Text("not started", "dim")
