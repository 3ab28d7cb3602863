"""Course machinery. Verifies a certificate: its digest, its page, and the checks of the student's files, run again.

The files are copied to a temporary folder and checked there with this checkout's own tests. Neither the progress file
nor anything else that the student could have written is read.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lessons._course.catalog import Lesson
from lessons._course.certificate import Certificate, Passed, complete, digest_of
from lessons._course.certificate_page import page_of, read_data
from lessons._course.commit import CHANGED, commit_of
from lessons._course.desk import Desk
from lessons._course.handed_in import work_folder
from lessons._course.messages import counted
from lessons._course.places import CourseError, Places
from lessons._course.progress import Progress
from lessons._course.proof import CORE, digests
from lessons._course.student import student_files
from lessons._course.tracks import Track, read_syllabus
from lessons._course.verdict import judge


@dataclass(frozen=True)
class Finding:
    """One thing that the certificate claims. lesson: its number; None if the claim is not about one lesson."""

    lesson: int | None
    holds: bool
    says: str


def verify_certificate(desk: Desk, file: Path, work: Path | None, as_json: bool) -> int:
    """Verify a certificate against the files in `work`, and print each finding. Return 0 if all of it holds.

    Raises:
        CourseError, UserError: there is no certificate in the file, or no such folder.
    """
    data, page = read_data(file)
    try:
        found = Certificate.parse(data)
    except CourseError as error:
        raise CourseError(f"{file} cannot be verified: {error}") from None
    folder, findings = work_folder(work or desk.places.work), []
    if not as_json:
        desk.view.line(f"{found.name}, {found.issued}: {counted(len(found.lessons), 'lesson')}", "bold")
    for finding in verified(desk, found, data, page, folder, quiet=as_json):
        findings.append(finding)
        if not as_json:
            desk.view.line(f"  {'holds' if finding.holds else 'FAILS'}  {finding.says}", "" if finding.holds else "red")
    holds, notes = all(finding.holds for finding in findings), notes_on(found, desk.places)
    if as_json:
        print(json.dumps({"name": found.name, "holds": holds, "findings": [*map(asdict, findings)], "notes": notes}))
        return 0 if holds else 1
    for note in notes:
        desk.view.line(f"  note   {note}", "yellow")
    desk.view.line(
        "The certificate holds." if holds else "The certificate does not hold.", f"bold {'green' if holds else 'red'}"
    )
    return 0 if holds else 1


def verified(
    desk: Desk, found: Certificate, data: dict[str, Any], page: str, work: Path, *, quiet: bool
) -> Iterator[Finding]:
    """Yield what holds and what does not. What was changed after it was written is not worth a check."""
    tracks, is_sound = read_syllabus(desk.places, desk.lessons).tracks, True
    for finding in on_paper(found, data, page, desk.lessons, tracks, commit_of(desk.places.root)):
        is_sound = is_sound and finding.holds
        yield finding
    if is_sound:
        known = {(lesson.number, lesson.id): lesson for lesson in desk.lessons}
        for one in found.lessons:
            lesson = known.get((one.number, one.id))
            if lesson is None:
                yield Finding(one.number, False, f"lesson {one.number}: this checkout has no {one.id}")
            else:
                yield checked_again(desk, one, lesson, work, quiet)


def on_paper(
    found: Certificate, data: dict[str, Any], page: str, lessons: Sequence[Lesson], tracks: Sequence[Track], commit: str
) -> Iterator[Finding]:
    """Yield what the certificate alone shows: whether it was changed, and whether one part of it implies another."""
    is_same = data.get("digest") == digest_of(data)
    yield Finding(None, is_same, f"digest: {'matches the data' if is_same else 'does not match; the data was changed'}")
    mine, theirs = (", ".join(names) or "none" for names in (complete(tracks, found.lessons), found.tracks))
    is_same = complete(tracks, found.lessons) == found.tracks
    yield Finding(None, is_same, f"tracks complete: {theirs}" + ("" if is_same else f"; its lessons complete: {mine}"))
    if page and page == page_of(found, lessons, tracks):
        yield Finding(None, True, "page: says what its data says")
    elif page and found.commit == commit:
        yield Finding(None, False, "page: does not say what its data says")
    elif page:
        yield Finding(None, True, "page: another commit's, and not compared with its data; go by what is printed here")


def checked_again(desk: Desk, one: Passed, lesson: Lesson, work: Path, quiet: bool) -> Finding:
    """Compare a copy of the student's files with the certified ones, and check it if they are the same."""
    about = f"lesson {lesson.number}, {lesson.title}: "
    with TemporaryDirectory(prefix="kv-certificate-", ignore_cleanup_errors=True) as kept:
        copy = Places(desk.places.root, Path(kept))
        if differ := copied_otherwise(one, lesson, Places(desk.places.root, work), copy):
            return Finding(lesson.number, False, about + differ)
        with nullcontext(lambda event: None) if quiet else desk.view.running(lesson) as watcher:
            progress, core = Progress(copy.work), one.part == CORE
            verdict = judge(lesson, copy, progress, everything=True, core=core, watcher=watcher)
        report = verdict.report
        if not (report.core_passed if core else report.passed):
            return Finding(lesson.number, False, about + verdict.advice.headline.replace(kept, "work"))
    if not set(one.proof.tasks) <= set(report.tasks_done):
        return Finding(lesson.number, False, f"{about}only tasks {report.tasks_done} are done")
    done, passed = counted(len(report.tasks_done), "task"), counted(report.count("passed"), "test")
    return Finding(lesson.number, True, f"{about}{done} done, {passed} passed ({report.seconds:.0f} s)")


def copied_otherwise(one: Passed, lesson: Lesson, theirs: Places, copy: Places) -> str:
    """Copy the student's files of a lesson. Return how they differ from the certified ones; empty if they do not."""
    copies = student_files(lesson, copy)
    for file, target in zip(student_files(lesson, theirs), copies, strict=True):
        name, certified = file.path.relative_to(theirs.work).as_posix(), one.proof.files.get(file.module)
        target.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(file.path, target.path)
            if digests([target])[file.module] != certified:
                return f"{name} is not the certified file"
        except FileNotFoundError:
            return f"{name} is missing"
        except (CourseError, OSError):
            return f"{name} cannot be read"
    return "" if one.proof.files.keys() == {file.module for file in copies} else "it has other files than certified"


def notes_on(found: Certificate, places: Places) -> list[str]:
    """Say where this checkout differs from the certified one, and from its own commit."""
    here, notes = commit_of(places.root), []
    if here.endswith(CHANGED):
        notes.append("this checkout's own files differ from its commit, so its tests may, too")
    commits = dict.fromkeys(one.proof.commit for one in found.lessons)
    others = [commit[:9] for commit in commits if commit.removesuffix(CHANGED) != here.removesuffix(CHANGED)]
    if others:
        notes.append(f"checked with commit {here[:9]}; certified with {', '.join(others)}")
    return notes
