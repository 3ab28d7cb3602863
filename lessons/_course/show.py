"""Course machinery. Prints what the commands show: the list, a check's summary, a diff, the doctor's findings."""

from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from lessons._course.advice import Advice
from lessons._course.catalog import Lesson
from lessons._course.compare import Row
from lessons._course.messages import counted
from lessons._course.progress import Entry
from lessons._course.report import Failure, Report
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
PLAIN_WIDTH = 110


def make_console(stderr: bool = False) -> Console:
    """Return a console that does not wrap lines when its output goes to a file or a pipe."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


class View:
    """Everything that is printed to one console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, text: str = "", style: str | None = None) -> None:
        """Print one line of plain text, never wrapped and never parsed as markup."""
        self.console.print(Text(text, style=style or ""), soft_wrap=True)

    def overview(self, lessons: list[Lesson], entries: dict[str, Entry]) -> None:
        table = grid("", "Lesson", "Minutes", "After", "Progress", header=True)
        for lesson in lessons:
            state = progress_text(lesson, entries[lesson.id])
            needs = ", ".join(map(str, lesson.needs)) or "–"
            table.add_row(str(lesson.number), lesson.title, str(lesson.minutes), needs, state)
        self.console.print(table)

    def report(self, report: Report) -> None:
        """Print each task, all tests, the tokens, and what was not checked."""
        table = grid("", "", "", "")
        for entry in report.tasks:
            passed = sum(result.outcome == "passed" for result in entry.results)
            count = f"{passed} of its {counted(len(entry.results), 'test')} passed"
            table.add_row(str(entry.task.number), entry.task.title, styled(entry.state), count)
        self.console.print(table)
        self.line()
        rows = grid("", "")
        rows.add_row("all tests", f"{report.count('passed')} of {len(report.results)} passed")
        smoke = report.smoke
        reason = escape(smoke.text)
        rows.add_row("tokens", reason if smoke.state == "equal" else f"{styled(smoke.state)}  {reason}")
        for line in report.skipped:
            rows.add_row("", f"{styled('NOT CHECKED')}  {escape(line)}")
        self.console.print(rows)
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
            self.console.print(f"{finding.name:<14} {styled(finding.state, 8)} {escape(first)}", soft_wrap=True)
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
        table = Table("yours: " + name, "reference", expand=True, box=None, pad_edge=False)
        styles = {"equal": ("", ""), "gap": ("cyan", "cyan"), "changed": ("red", "green")}
        for row in rows:
            mine, reference = styles[row.kind]
            table.add_row(Text(row.mine, mine), Text(row.reference, reference))
        self.console.print(table)

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


def grid(*titles: str, header: bool = False) -> Table:
    return Table(*titles, box=None, show_header=header, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def styled(state: str, width: int = 0) -> str:
    style = STYLES.get(state)
    text = f"{state:<{width}}"
    return f"[{style}]{text}[/]" if style else text


def progress_text(lesson: Lesson, entry: Entry) -> str:
    """Return "passed", "2 of 5 tasks" or "not started", and how much was not checked."""
    if entry.passed:
        rest = f", {len(entry.not_checked)} NOT CHECKED" if entry.not_checked else ""
        return f"[green]passed[/] {entry.passed}[yellow]{rest}[/]"
    if entry.started:
        known = {task.number for task in lesson.tasks}
        return f"{len(known & set(entry.tasks_done))} of {len(lesson.tasks)} tasks"
    return "[dim]not started[/]"
