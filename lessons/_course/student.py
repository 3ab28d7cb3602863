"""Course machinery. The student's files: where they lie, how they start, what is wrong before anything is run."""

import ast
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lessons._course.catalog import Lesson
from lessons._course.places import CourseError, Places
from lessons._course.progress import Entry, free_name, today
from lessons._course.starter import blank_symbols, fingerprint, make_starter, signatures, task_message


@dataclass(frozen=True)
class StudentFile:
    """One module of a lesson: the reference, and the student's file that takes its place."""

    module: str
    reference: Path
    path: Path

    @property
    def import_name(self) -> str:
        return self.module.removesuffix(".py").replace("/", ".")

    @property
    def reference_source(self) -> str:
        return self.reference.read_text(encoding="utf-8")

    @property
    def source(self) -> str:
        """The student's text, without the mark that some editors on Windows put before it.

        Raises:
            CourseError: it is not UTF-8.
        """
        try:
            return self.path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise CourseError(f"{self.path} is not UTF-8 text; save it with that encoding.") from None


@dataclass(frozen=True)
class Problem:
    """Something wrong that needs no test to be seen. `kind`: syntax, missing or signature."""

    kind: str
    text: str
    path: Path
    symbol: str = ""
    line: int = 0


@dataclass(frozen=True)
class Change:
    """How the reference has moved on since the student started; no symbols: only in code outside the tasks."""

    path: Path
    symbols: dict[str, str]


def student_files(lesson: Lesson, places: Places) -> list[StudentFile]:
    """`work/l2/token_flat.py`; where two modules share a name, `work/l2/kv/token_flat.py`."""
    names = [Path(module).name for module in lesson.modules]
    folder = places.work / f"l{lesson.number}"
    return [
        StudentFile(
            module,
            places.root / module,
            folder / (name if names.count(name) == 1 else Path(module).relative_to("mini_engine")),
        )
        for module, name in zip(lesson.modules, names, strict=True)
    ]


def starter_of(lesson: Lesson, file: StudentFile, keep: Collection[int] = ()) -> str:
    """The reference without its tasks' bodies; those of the tasks in `keep` stay."""
    return make_starter(file.reference_source, blanks_of(lesson, file, keep))


def blanks_of(lesson: Lesson, file: StudentFile, keep: Collection[int] = ()) -> dict[str, str]:
    """What the unwritten bodies of this module raise, by symbol."""
    return {
        symbol: task_message(lesson.number, task.number, task.title)
        for symbol, task in lesson.tasks_in(file.module).items()
        if task.number not in keep
    }


def start(lesson: Lesson, places: Places, entry: Entry) -> list[Path]:
    """Write the starters that are not there yet, and note in `entry` what they were made from."""
    written = []
    for file in student_files(lesson, places):
        if not file.path.exists():
            write_new(file.path, starter_of(lesson, file))
            written.append(file.path)
        if file.path in written or file.module not in entry.starters:
            note_starter(lesson, file, entry)
    entry.started = entry.started or today()
    return written


def start_beside(lesson: Lesson, places: Places, entry: Entry) -> list[Path]:
    """Write a fresh starter beside each of the student's files, under a new name."""
    written = []
    for file in student_files(lesson, places):
        beside = free_name(file.path, "fresh")
        write_new(beside, starter_of(lesson, file))
        note_starter(lesson, file, entry)
        written.append(beside)
    return written


def put_aside(lesson: Lesson, places: Places) -> list[tuple[Path, Path]]:
    """Rename the student's files to names that are free; (old name, new name) of each. Untouched starters stay."""
    moved = []
    for file in student_files(lesson, places):
        if file.path.exists() and file.path.read_bytes() != starter_of(lesson, file).encode():
            kept = free_name(file.path, "old")
            file.path.rename(kept)
            moved.append((file.path, kept))
    return moved


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist; one that does is never touched."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise CourseError(f"{path} cannot be written: {error.strerror}.") from None


def note_starter(lesson: Lesson, file: StudentFile, entry: Entry) -> None:
    """Keep in `entry` how the reference looks now, so that a later change of it can be told from the student's."""
    entry.starters[file.module] = {
        "signatures": signatures(file.reference_source),
        "fingerprint": fingerprint(starter_of(lesson, file)),
    }


def problems(lesson: Lesson, file: StudentFile, entry: Entry) -> list[Problem]:
    """What can be seen in the student's text alone: a syntax error, something missing, a changed signature."""
    try:
        mine = signatures(file.source)
    except (SyntaxError, ValueError) as error:
        return [_syntax_problem(file, error)]
    theirs = signatures(file.reference_source)
    at_start = entry.starters.get(file.module, {}).get("signatures", theirs)
    found = []
    for symbol, expected in theirs.items():
        if at_start.get(symbol) != expected:
            continue
        if symbol not in mine:
            found.append(Problem("missing", _missing(lesson, file, symbol), file.path, symbol))
        elif mine[symbol] != expected:
            found.append(Problem("signature", _changed(symbol, mine[symbol], expected), file.path, symbol))
    return found


def reference_change(lesson: Lesson, file: StudentFile, entry: Entry) -> Change | None:
    """What of the reference, its tasks' bodies apart, changed since the start and is not in the student's file yet."""
    before = entry.starters.get(file.module)
    if not isinstance(before, dict) or before.get("fingerprint") == fingerprint(starter_of(lesson, file)):
        return None
    now, then = signatures(file.reference_source), before.get("signatures", {})
    try:
        mine = signatures(file.source)
        blanks = {symbol: text for symbol, text in blanks_of(lesson, file).items() if symbol in mine}
        if fingerprint(make_starter(file.source, blanks)) == fingerprint(starter_of(lesson, file)):
            return None
    except (SyntaxError, ValueError):
        return None
    return Change(
        file.path, {name: text for name, text in now.items() if then.get(name) != text and mine.get(name) != text}
    )


def unwritten(lesson: Lesson, files: list[StudentFile]) -> set[int]:
    """The tasks with a body that still only raises. A file that cannot be parsed counts as written."""
    tasks = set()
    for file in files:
        try:
            blank = blank_symbols(file.source)
        except (SyntaxError, ValueError):
            continue
        tasks |= {task.number for symbol, task in lesson.tasks_in(file.module).items() if symbol in blank}
    return tasks


def line_of(file: StudentFile, symbol: str) -> int:
    """The line where the student's `symbol` is defined; 0 if it is not there."""
    from lessons._course.starter import definitions

    try:
        return next((node.lineno for name, node in definitions(ast.parse(file.source)) if name == symbol), 0)
    except (SyntaxError, ValueError):
        return 0


def _syntax_problem(file: StudentFile, error: SyntaxError | ValueError) -> Problem:
    if not isinstance(error, SyntaxError):
        return Problem("syntax", f"Python cannot read the file: {error}.", file.path)
    lines = [f"Python cannot read line {error.lineno}: {error.msg}."]
    if error.text:
        text = error.text.rstrip("\n").replace("\t", " ")
        caret = " " * (max(error.offset or 1, 1) - 1) + "^"
        lines += ["    " + text, "    " + caret]
    return Problem("syntax", "\n".join(lines), file.path, line=error.lineno or 0)


def _missing(lesson: Lesson, file: StudentFile, symbol: str) -> str:
    task = lesson.tasks_in(file.module).get(symbol)
    what = f"{symbol} (task {task.number})" if task else symbol
    return f"{what} is no longer in your file. The tests and the engine call it by that name."


def _changed(symbol: str, mine: str, expected: str) -> str:
    return f"{symbol} is {mine} in your file, but the tests and the engine use it as {expected}."
