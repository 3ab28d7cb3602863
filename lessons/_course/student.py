"""Course machinery. The student's files: where they are, how they begin, what is wrong before anything is run."""

import ast
import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lessons._course.catalog import Lesson
from lessons._course.places import CourseError, Places
from lessons._course.progress import Entry, free_name, today
from lessons._course.starter import blank_symbols, fingerprint, make_starter, signatures, task_message


@dataclass(frozen=True)
class StudentFile:
    """One module of a lesson: the reference, and the student's file that replaces it."""

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
        """The student's source, without the byte order mark that some Windows editors add.

        Raises:
            CourseError: the file is not UTF-8.
        """
        try:
            return self.path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise CourseError(f"{self.path} is not UTF-8 text; save it as UTF-8.") from None

    @property
    def digest(self) -> str:
        """The SHA-256 of the source, which is the same with Windows' line ends."""
        return hashlib.sha256(self.source.encode()).hexdigest()


@dataclass(frozen=True)
class Problem:
    """A problem that shows without running a test. kind: syntax, missing or signature."""

    kind: str
    text: str
    path: Path
    symbol: str = ""
    line: int = 0


@dataclass(frozen=True)
class Change:
    """How the reference has changed since the student started. No symbols: only code outside the tasks changed."""

    path: Path
    symbols: dict[str, str]


def student_files(lesson: Lesson, places: Places) -> list[StudentFile]:
    """Return the lesson's files: `work/l2/token_flat.py`, or `work/l2/kv/token_flat.py` if two modules share a name."""
    names = [Path(module).name for module in lesson.modules]
    folder = places.work / f"l{lesson.number}"
    return [
        StudentFile(
            module,
            places.root / module,
            folder / (name if names.count(name) == 1 else Path(*Path(module).parts[1:])),
        )
        for module, name in zip(lesson.modules, names, strict=True)
    ]


def starter_of(lesson: Lesson, file: StudentFile, keep: Collection[int] = ()) -> str:
    """Return the reference without the bodies of its tasks, except those in `keep`."""
    return make_starter(file.reference_source, blanks_of(lesson, file, keep))


def blanks_of(lesson: Lesson, file: StudentFile, keep: Collection[int] = ()) -> dict[str, str]:
    """Return the messages that this module's unwritten bodies raise, by symbol."""
    return {
        symbol: task_message(lesson.number, task.number, task.title)
        for symbol, task in lesson.tasks_in(file.module).items()
        if task.number not in keep
    }


def start(lesson: Lesson, places: Places, entry: Entry) -> list[Path]:
    """Write the starters that do not exist yet, and record in `entry` what they were made from."""
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
    """Write a new starter beside each of the student's files, under an unused name."""
    written = []
    for file in student_files(lesson, places):
        beside = free_name(file.path, "fresh")
        write_new(beside, starter_of(lesson, file))
        note_starter(lesson, file, entry)
        written.append(beside)
    return written


def put_aside(lesson: Lesson, places: Places) -> list[tuple[Path, Path]]:
    """Rename the student's files to unused names, except unchanged starters. Return (old path, new path) of each."""
    moved = []
    for file in student_files(lesson, places):
        if file.path.exists() and file.path.read_bytes() != starter_of(lesson, file).encode():
            kept = free_name(file.path, "old")
            file.path.rename(kept)
            moved.append((file.path, kept))
    return moved


def write_new(path: Path, text: str) -> None:
    """Write a new file. An existing one is never touched."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise CourseError(f"{path} cannot be written: {error.strerror}.") from None


def note_starter(lesson: Lesson, file: StudentFile, entry: Entry) -> None:
    """Record the reference's state in `entry`, so that later changes to it can be told from the student's."""
    entry.starters[file.module] = {
        "signatures": signatures(file.reference_source),
        "fingerprint": fingerprint(starter_of(lesson, file)),
    }


def problems(lesson: Lesson, file: StudentFile, entry: Entry) -> list[Problem]:
    """Return what the student's source alone shows: a syntax error, missing symbols, changed signatures."""
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
    """Return what changed in the reference, apart from task bodies, and is not in the student's file yet."""
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
    """Return the tasks whose body still only raises. A file that cannot be parsed counts as written."""
    tasks = set()
    for file in files:
        try:
            blank = blank_symbols(file.source)
        except (SyntaxError, ValueError):
            continue
        tasks |= {task.number for symbol, task in lesson.tasks_in(file.module).items() if symbol in blank}
    return tasks


def bodies_of(lesson: Lesson, files: list[StudentFile], tasks: Collection[int]) -> dict[str, dict[str, Any]]:
    """Return, by module, the reference's file and the symbols of these tasks, whose bodies come from there."""
    found = {file: [s for s, t in lesson.tasks_in(file.module).items() if t.number in tasks] for file in files}
    return {
        file.import_name: {"reference": str(file.reference), "symbols": symbols}
        for file, symbols in found.items()
        if symbols
    }


def line_of(file: StudentFile, symbol: str) -> int:
    """Return the line where the student's `symbol` is defined, 0 if there is none."""
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
    return f"Your {symbol} is {mine}, but the tests and the engine expect {expected}."
