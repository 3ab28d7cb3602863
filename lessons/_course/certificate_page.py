"""Course machinery. The certificate's page: one HTML file that prints on one sheet and contains its data as JSON."""

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from rich.cells import cell_len

from lessons._course.catalog import Lesson
from lessons._course.certificate import Certificate, Passed, certify
from lessons._course.commit import CHANGED
from lessons._course.desk import COMMAND, Desk
from lessons._course.messages import counted
from lessons._course.places import CourseError
from lessons._course.proof import WHOLE
from lessons._course.tracks import Track, read_syllabus

HOME = "https://kv-course.github.io/kv-course/"
PAGE = "certificate.html"
DATA = re.compile(r'<script type="application/json" id="certificate">(.*?)</script>', re.DOTALL)
NOTES = {  # by the mark in a row of the table
    "†": "† The solution was opened before the lesson passed.",
    "*": "* The course's own files had been changed.",
}
SIZES = ((60, "longest"), (30, "long"), (0, ""))  # of a name with more than so many columns


def write_certificate(desk: Desk, name: str, out: Path | None, as_json: bool) -> int:
    """Write the page, and say where it is and what was left out. With `as_json` print its data instead.

    Raises:
        CourseError: there is nothing to certify, or the file cannot be written.
    """
    tracks = read_syllabus(desk.places, desk.lessons).tracks
    found, left_out = certify(name, desk.places, desk.lessons, tracks, desk.progress)
    if out or not as_json:
        out = out or desk.places.work / PAGE
        save(out, page_of(found, desk.lessons, tracks))
    if as_json:
        print(json.dumps(found.as_dict()))
        return 0
    desk.view.line(f"Written: {desk.shown(out)} ({found.name}, {counted(len(found.lessons), 'lesson')})", "bold green")
    for line in left_out:
        desk.view.line(f"Left out: {line}", "yellow")
    desk.view.line(f"To print it, open it in a browser. To verify it: {COMMAND} certificate --verify {desk.shown(out)}")
    return 0


def save(path: Path, text: str) -> None:
    """Write the page. Only another certificate is overwritten.

    Raises:
        CourseError: the path is another file's, or cannot be written.
    """
    try:
        if path.exists() and not DATA.search(path.read_text(encoding="utf-8", errors="replace")):
            raise CourseError(f"{path} is not a certificate and stays as it is; give --out another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".new")
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(path)
    except OSError as error:
        raise CourseError(f"{path} cannot be written: {error.strerror}") from None


def read_data(path: Path) -> tuple[dict[str, Any], str]:
    """Return the data of a certificate, and the page around it; no page if the file is plain JSON.

    Raises:
        CourseError: there is no certificate in the file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CourseError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CourseError(f"{path} is not a certificate: it is not text") from None
    found = DATA.search(text)
    try:
        data = json.loads(found[1] if found else text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise CourseError(f"{path} is not a certificate: there is no data in it")
    return data, text if found else ""


def page_of(found: Certificate, lessons: Sequence[Lesson], tracks: Sequence[Track]) -> str:
    """Return the page."""
    data, passed = found.as_dict(), {one.id: one for one in found.lessons}
    rows = [row_of(passed[lesson.id], lesson) for lesson in lessons if lesson.id in passed]
    tasks = sum(len(one.proof.tasks) for one in found.lessons)
    text = {
        "name": found.name,
        "size": next(size for columns, size in SIZES if cell_len(found.name) > columns or not columns),
        "issued": found.issued,
        "version": found.version,
        "commit": found.commit,
        "count": f"{'all' if len(rows) == len(lessons) else f'{len(rows)} of the'} {counted(len(lessons), 'lesson')}",
        "notes": " ".join(text for mark, text in NOTES.items() if any(mark in row for row in rows)),
        "tasks": counted(tasks, "task"),
        "digest": data["digest"],
        "home": HOME,
    }
    template = Template(Path(__file__).with_suffix(".html").with_stem("certificate").read_text(encoding="utf-8"))
    return template.substitute(
        {key: escape(value) for key, value in text.items()},
        tracks="\n".join(track_of(track, found) for track in tracks),
        rows="\n".join(rows),
        data=json.dumps(data).replace("<", "\\u003c"),
    )


def track_of(track: Track, found: Certificate) -> str:
    """Return a track as a row of blocks, one for each lesson."""
    passed = {one.number for one in found.lessons}
    blocks = "".join(f"<i{' class=on' if n in passed else ''}>{n}</i>" for n in track.lessons)
    state = f"{len(passed & set(track.lessons))} of {len(track.lessons)}"
    if track.id in found.tracks:
        state = "complete" if found.tracks[track.id] == WHOLE else "complete: core tasks"
    return (
        f'<li><b>{escape(track.title)}</b><span class="blocks" aria-hidden="true">{blocks}</span>{escape(state)}</li>'
    )


def row_of(one: Passed, lesson: Lesson) -> str:
    """Return a lesson's row of the table."""
    proof, opened = one.proof, " †" if one.solution_opened else ""
    part = "" if one.part == WHOLE else "core, "
    commit = proof.commit.removesuffix(CHANGED)[:9] + ("*" if proof.commit.endswith(CHANGED) else "")
    return (
        f'<tr><td class="figure">{lesson.number}</td><th scope="row">{escape(lesson.title)}{opened}</th>'
        f'<td class="figure">{part}{len(proof.tasks)} of {len(lesson.tasks)}</td>'
        f'<td class="figure">{proof.tests_passed} of {proof.tests_total}</td>'
        f"<td>{escape(proof.date)}</td><td><code>{escape(commit)}</code></td></tr>"
    )
