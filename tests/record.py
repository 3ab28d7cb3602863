"""Course machinery. The record of slow tests: a digest of what each depends on, taken when it last passed.

A slow test says what it depends on, `@pytest.mark.slow("mini_engine", "tests/l5")`, or is a proof about one lesson.
With `--changed-only`, slow tests are skipped while that is as recorded; `--record` writes the record.
`python -m tests.record FILE` says by its exit code whether `--changed-only` would run a slow test of the file.
"""

import hashlib
import io
import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests/record.json"
NUMBER = re.compile(r"Lesson (\d+)\.")
CODE = {".py", ".cpp", ".h"}  # the kernels in C++ too
NO_PROOF_RUNS = {"grading", "live", "machine", "pages", "release", "setup", "traces", "website"}  # of scripts/
MACHINERY = ("lessons/_course", "tests/course/proofs.py", "tests/course/toy.py", "scripts/constraints.txt")
COMMON = ("tests/conftest.py", "tests/support.py", "tests/course/conftest.py")


@cache
def digest(*paths: str) -> str:
    """Return a digest of these files and folders (relative to the repository), independent of line endings."""
    files = [file for path in paths for file in files_of(ROOT / path)]
    whole = hashlib.sha256()
    for file in sorted(set(files)):
        whole.update(f"{file.relative_to(ROOT).as_posix()}\n".encode() + file.read_bytes().replace(b"\r\n", b"\n"))
    return whole.hexdigest()


def files_of(path: Path) -> list[Path]:
    """Return the files of the repository in a folder: neither bytecode, nor what was fetched for the labs."""
    if path.is_file():
        return [path]
    found = [file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return [file for file in found if "assets/live/vendor" not in file.as_posix()]


@cache
def lesson_paths(number: int, folder: str) -> tuple[str, ...]:
    """Return what the proofs about one lesson depend on.

    Of the engine and the scripts that is what belongs to this lesson or an earlier one, by the first words of a
    module: a later lesson's cannot even be imported in those proofs.
    """
    parts = [file for part in ("mini_engine", "scripts") for file in (ROOT / part).rglob("*")]
    engine = [file for file in parts if file.suffix in CODE and file.relative_to(ROOT).parts[1] not in NO_PROOF_RUNS]
    starts = {file: file.read_text(encoding="utf-8")[:80] for file in engine}
    mine = [file for file, text in starts.items() if not (found := NUMBER.search(text)) or int(found[1]) <= number]
    tests = (f"tests/l{number}", f"tests/course/transcripts/l{number}.txt", folder, *MACHINERY)
    return tuple(file.relative_to(ROOT).as_posix() for file in mine) + tuple(p for p in tests if (ROOT / p).exists())


class Subject:
    """What a slow test is about: its key in the record, and the digest of what it depends on."""

    def __init__(self, item: pytest.Item, paths: tuple[str, ...]) -> None:
        file = item.path.relative_to(ROOT).as_posix()
        lesson = item.callspec.params.get("lesson") if hasattr(item, "callspec") else None
        self.key = f"{file} {lesson.id}" if hasattr(lesson, "id") else file
        if hasattr(lesson, "id"):
            paths = (*paths, *lesson_paths(lesson.number, lesson.folder.relative_to(ROOT).as_posix()))
        self.paths = (file, *COMMON, *paths)

    @property
    def digest(self) -> str:
        return digest(*self.paths)


def subject(item: pytest.Item) -> Subject | None:
    """Return what a slow test is about; None if the test is not slow or depends on everything."""
    marks = list(item.iter_markers("slow"))
    paths = tuple(path for mark in marks for path in mark.args)
    about_a_lesson = hasattr(item, "callspec") and hasattr(item.callspec.params.get("lesson"), "id")
    return Subject(item, paths) if marks and (paths or about_a_lesson) else None


def recorded() -> dict[str, str]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def is_on_record(item: pytest.Item) -> bool:
    """Whether `--changed-only` is on and all that this slow test depends on is as recorded."""
    if not item.config.getoption("--changed-only") or not (about := subject(item)):
        return False
    return recorded().get(about.key) == about.digest


class Recorder:
    """A pytest plugin: at the end of a run, records each subject of which a slow test passed and none failed.

    Where all are skipped, for want of an extra or on another system, nothing was found out, and nothing is recorded.
    """

    def __init__(self) -> None:
        self.about: dict[str, Subject] = {}
        self.open: set[str] = set()

    def pytest_deselected(self, items) -> None:
        self.open |= {about.key for item in items if (about := subject(item))}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if about := subject(item):
            if report.when == "call" and report.passed:
                self.about[about.key] = about
            if report.outcome == "failed":
                self.open.add(about.key)
        return report

    def pytest_sessionfinish(self, session) -> None:
        digest.cache_clear()  # transcripts may have been written meanwhile
        lesson_paths.cache_clear()
        new = {key: digest(*about.paths) for key, about in self.about.items() if key not in self.open}
        kept = {key: text for key, text in recorded().items() if (ROOT / key.split(" ")[0]).exists()}
        if new:
            text = json.dumps(kept | new, indent=2, sort_keys=True) + "\n"
            RECORD.write_text(text, encoding="utf-8", newline="\n")


class Collected:
    """A pytest plugin: notes whether any collected test would run."""

    def __init__(self) -> None:
        self.would_run = False

    def pytest_collection_finish(self, session) -> None:
        self.would_run = not all(is_on_record(item) for item in session.items)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if `--changed-only` would run a slow test of these files, 1 if not."""
    paths = sys.argv[1:] if argv is None else argv
    collected = Collected()
    with redirect_stdout(io.StringIO()):
        code = pytest.main([*paths, "--collect-only", "-q", "-m", "slow", "--changed-only"], plugins=[collected])
    return 0 if collected.would_run or code != pytest.ExitCode.OK else 1


if __name__ == "__main__":
    sys.exit(main())
