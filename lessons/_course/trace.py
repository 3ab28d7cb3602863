"""Course machinery. `check N --trace`: records the student's files with the lesson's recorder and writes a page.

The page is one file that contains player, view, styles and traces, so it opens from disk without a server.
"""

import json
import os
import sys
import tempfile
import time
import webbrowser
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lessons._course.catalog import Lesson
from lessons._course.desk import COMMAND, Desk
from lessons._course.environment import python_environment
from lessons._course.order import is_stop
from lessons._course.output import last_lines
from lessons._course.places import CourseError, Places
from lessons._course.runner import Command, Spawned, run_until
from lessons._course.student import StudentFile, bodies_of, student_files, unwritten
from lessons._course.verdict import need_files

RECORDER = "scripts.traces.record"
PLAYER = Path("site/theme/assets/player")
PAGE = "trace.html"


@dataclass(frozen=True)
class OwnRun:
    """A student's trace and the course's.

    differs_at: the index of the first frame that differs; None if all are equal.
    """

    mine: dict[str, Any]
    course: dict[str, Any]

    @property
    def differs_at(self) -> int | None:
        pairs = zip(self.mine["frames"], self.course["frames"], strict=False)
        same = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        if same is None and len(self.mine["frames"]) != len(self.course["frames"]):
            return min(len(self.mine["frames"]), len(self.course["frames"]))
        return same

    @property
    def verdict(self) -> str:
        at = self.differs_at
        if at is None:
            return f"All {len(self.mine['frames'])} steps of your run equal the course's."
        if at == len(self.mine["frames"]):
            return f"Your run ends after step {at}; the course's continues."
        return f"Your run differs from the course's from step {at + 1} on. Both pictures begin there."


def show_own_run(desk: Desk, lesson: Lesson, *, seconds: float, browser: bool, as_json: bool) -> bool:
    """Record the run, write the page, say where it is and open it. Return whether the run equals the course's.

    Raises:
        CourseError: the lesson has no trace, the student has not started, or the run could not be recorded.
    """
    recorded = course_trace(lesson)
    files = student_files(lesson, desk.places)
    need_files(files, lesson, desk.places)
    blank = unwritten(lesson, files)
    if blank and not is_stop(lesson, blank):
        task = lesson.task(min(blank))
        raise CourseError(
            f"Task {task.number} is not written yet: {task.title}. The picture shows your run at a stop, and once "
            f"every task is written; see: {COMMAND} check {lesson.number}"
        )
    filled = bodies_of(lesson, files, blank)
    run = OwnRun(record(lesson, desk.places, files, filled, recorded, seconds), read_trace(recorded))
    page = desk.places.work / f"l{lesson.number}" / PAGE
    page.write_text(page_of(lesson, run, desk.places), encoding="utf-8", newline="\n")
    at = run.differs_at
    if as_json:
        print(json.dumps({"lesson": lesson.number, "page": str(page), "equal": at is None, "differs_at": at}))
    else:
        desk.view.line(run.verdict, "bold green" if at is None else "bold yellow")
        desk.view.line(f"Your run as an animated picture: {desk.shown(page)}")
        if browser and has_screen():
            webbrowser.open(page.as_uri())
    return at is None


def course_trace(lesson: Lesson) -> Path:
    """Return the path of the lesson's recorded trace.

    Raises:
        CourseError: the lesson has none.
    """
    found = sorted(lesson.folder.glob("*.trace.js"))
    if not found:
        raise CourseError(
            f"Lesson {lesson.number} has no animated picture; check it with: {COMMAND} check {lesson.number}"
        )
    return found[0]


def read_trace(path: Path) -> dict[str, Any]:
    """Return the trace in a `*.trace.js` file."""
    body = path.read_text(encoding="utf-8").partition("] = ")[2]
    return json.loads(body[: body.rindex(";")])


def record(
    lesson: Lesson,
    places: Places,
    files: list[StudentFile],
    filled: dict[str, dict[str, Any]],
    recorded: Path,
    seconds: float,
) -> dict[str, Any]:
    """Run the lesson's recorder on the student's files in a separate process and return the trace.

    filled: the bodies that are the reference's (`bodies_of`).
    """
    overlay = {file.import_name: str(file.path) for file in files}
    env = python_environment(places) | {
        "KV_COURSE_OVERLAY": json.dumps(overlay),
        "KV_COURSE_FILLED": json.dumps(filled),
    }
    with tempfile.TemporaryDirectory(prefix="lessons-", ignore_cleanup_errors=True) as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        arguments = ["-m", RECORDER, "--only", read_trace(recorded)["id"], "--to", folder]
        job = Spawned(Command(arguments, env, places.root, out, err))
        code = run_until(job, time.monotonic() + seconds, lambda: None)
        if code is None:
            raise CourseError(f"Your run did not finish within {seconds:g} s; a loop in your file may never end.")
        if code:
            last = last_lines(out, err, count=1)
            raise CourseError(f"Your code failed ({last}); for more: {COMMAND} check {lesson.number}")
        return read_trace(Path(folder) / recorded.name)


def renamed(trace: dict[str, Any], name: str) -> dict[str, Any]:
    return {**trace, "id": name}


def page_of(lesson: Lesson, run: OwnRun, places: Places) -> str:
    """Return the page: the student's run, and below it the course's if they differ."""
    at, kind = run.differs_at, run.course["kind"]
    mine, course = renamed(run.mine, "mine"), renamed(run.course, "course")
    shown = {"mine": mine}
    if at is not None:  # the answers to the questions are those of a correct run
        mine["frames"] = [{key: value for key, value in frame.items() if key != "ask"} for frame in mine["frames"]]
        mine["title"], course["title"] = "Your run", "The course's run"
        shown["course"] = course
    read = {
        name: (places.root / PLAYER / name).read_text(encoding="utf-8")
        for name in ("player.css", "player.js", f"views/{kind}.js")
    }
    traces = json.dumps(shown, ensure_ascii=False).replace("</", "<\\/")
    links = "\n".join(
        f'<p><a class="kv-player" data-trace="{name}" data-start="{at or 0}" href="#"></a></p>' for name in shown
    )
    title = f"Lesson {lesson.number}: {escape(lesson.title)}"
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}: your run</title>
<style>
{read["player.css"]}
body {{ max-width: 760px; margin: 0 auto; padding: 12px; font-family: system-ui, sans-serif }}
body {{ background: var(--kv-well); color: var(--kv-ink) }}
</style>
<body data-md-color-scheme="default">
<script>if (matchMedia("(prefers-color-scheme: dark)").matches) document.body.dataset.mdColorScheme = "slate";</script>
<main>
<h1>{title}</h1>
<p>{escape(run.verdict)}</p>
{links}
</main>
<script>window.KV_TRACES = {traces};</script>
<script>{read["player.js"]}</script>
<script>{read[f"views/{kind}.js"]}</script>
</body>
</html>
"""


def has_screen() -> bool:
    """Whether to open a browser. Without a display, a text-mode browser might take over the terminal."""
    if not sys.stdout.isatty():
        return False
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
