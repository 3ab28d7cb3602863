"""Course machinery. Checks a student's submission: a copy of it, in a separate process, with the course's own tests.

Only Python files of the lesson's folder are copied. The progress file is not, so its claims do not count, and neither
are links, which could lead to the reference.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts import ROOT
from scripts.grading.points import Graded, graded, nothing

from lessons._course.catalog import Lesson
from lessons._course.places import ROOT_VARIABLE, WORK_VARIABLE, Places

SPARE_SECONDS = 120.0  # beyond the check's own limit, for starting and for explaining


def grade(lesson: Lesson, places: Places, work: Path, seconds: float, core: bool = False) -> Graded:
    """Check one lesson of one student and return the points. Whatever the student's code does, this returns.

    Args:
        core: whether only the core's tasks count.
    """
    if core:
        lesson = replace(lesson, tasks=tuple(task for task in lesson.tasks if not task.is_more))
    folder = work / f"l{lesson.number}"
    if not folder.is_dir() or folder.is_symlink():
        return nothing(lesson, f"Nothing was handed in: there is no folder {folder.name}.", "not handed in")
    with TemporaryDirectory(prefix="kv-grading-", ignore_cleanup_errors=True) as kept:
        copy_sources(folder, Path(kept) / folder.name)
        found = verdict_of(lesson, places, Path(kept), seconds, "--all", *(["--core"] if core else []))
        return nothing(lesson, found) if isinstance(found, str) else graded(lesson, found)


def copy_sources(source: Path, target: Path) -> None:
    """Copy the regular Python files below `source`."""
    for path in sorted(source.rglob("*.py")):
        parts = [path, *(parent for parent in path.parents if parent.is_relative_to(source))]
        if path.is_file() and not any(part.is_symlink() for part in parts):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def verdict_of(lesson: Lesson, places: Places, work: Path, seconds: float, *options: str) -> dict | str:
    """Run `check N --json` with `work` as the student's folder. Return its verdict, or why it printed none.

    In its output, that folder is called work.
    """
    command = [sys.executable, "-m", "lessons", "check", str(lesson.number), "--json", *options]
    environment = os.environ | {WORK_VARIABLE: str(work), ROOT_VARIABLE: str(places.root), "PYTHONUTF8": "1"}
    try:
        done = subprocess.run(
            [*command, "--time-limit", str(seconds)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds + SPARE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"The check did not end within {seconds + SPARE_SECONDS:.0f} seconds."
    verdict = verdict_in(done.stdout)
    if verdict is None:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["it printed nothing"]
        return f"Nothing could be checked: {said[-1].replace(str(work), 'work')}"
    return json.loads(json.dumps(verdict).replace(json.dumps(str(work))[1:-1], "work"))


def verdict_in(output: str) -> dict | None:
    """Return the last line that is a verdict; None if there is none."""
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and {"tasks", "smoke", "advice"} <= found.keys():
            return found
    return None
