"""Course machinery. The certificate's data: who it names, which lessons passed with which files, and its digest."""

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lessons._course.catalog import Lesson
from lessons._course.commit import commit_of
from lessons._course.places import COMMAND, CourseError, Places
from lessons._course.progress import Entry, Progress, today
from lessons._course.proof import PARTS, Proof, digests
from lessons._course.student import student_files
from lessons._course.tracks import Track
from mini_engine import __version__

KIND = "certificate of the KV course"
FORMAT = 1
LONGEST_NAME = 100
JOINERS = "\u200c\u200d"  # invisible, and needed to write some names


@dataclass(frozen=True)
class Passed:
    """A lesson that passed. part: of PARTS. solution_opened: whether it was opened with --give-up."""

    number: int
    id: str
    part: str
    proof: Proof
    solution_opened: bool


@dataclass(frozen=True)
class Certificate:
    """What a certificate says. tracks: the part in which each complete track passed, by the track's id."""

    name: str
    issued: str
    version: str
    commit: str
    tracks: Mapping[str, str]
    lessons: Sequence[Passed]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that is written, with its digest."""
        data = {"kind": KIND, "format": FORMAT, **asdict(self)}
        return data | {"digest": digest_of(data)}

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "Certificate":
        """Read what `as_dict` returned.

        Raises:
            CourseError: it is not a certificate, or lacks something.
        """
        if raw.get("kind") != KIND:
            raise CourseError("it is not a certificate of this course")
        if raw.get("format") != FORMAT:
            raise CourseError(f"its format is {raw.get('format')!r}, and this version of the course reads {FORMAT}")
        try:
            lessons = [Passed(**{**one, "proof": Proof.parse(one["proof"])}) for one in raw["lessons"]]
            found = cls(**{key: raw[key] for key in ("name", "issued", "version", "commit", "tracks")}, lessons=lessons)
        except (AttributeError, KeyError, TypeError):
            raise CourseError("parts of the certificate are missing") from None
        if not found._is_sound():
            raise CourseError("parts of the certificate are not what they must be")
        return found

    def _is_sound(self) -> bool:
        texts = [self.name, self.issued, self.version, self.commit, *(one.id for one in self.lessons)]
        numbers = [one.number for one in self.lessons]
        return (
            {*map(type, texts)} == {str}
            and {*map(type, numbers)} == {int}
            and len(set(numbers)) == len(numbers)
            and isinstance(self.tracks, dict)
            and all(isinstance(one.proof, Proof) and one.part in PARTS for one in self.lessons)
        )


def digest_of(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything in `data` but its digest, written as JSON in one fixed way."""
    rest = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def certify(
    name: str, places: Places, lessons: Sequence[Lesson], tracks: Sequence[Track], progress: Progress
) -> tuple[Certificate, list[str]]:
    """Return the certificate, and a sentence for each lesson that has passed once and is left out.

    Raises:
        CourseError: the name cannot be printed, or there is nothing to certify.
    """
    name, found, left_out = clean_name(name), [], []
    for lesson in lessons:
        entry, now = progress.entry(lesson), digests(student_files(lesson, places))
        proofs = {part: proof for part in PARTS if (proof := Proof.parse(entry.proofs.get(part)))}
        part = next((part for part, proof in proofs.items() if proof.files == now), None)
        if part:
            found.append(Passed(lesson.number, lesson.id, part, proofs[part], entry.gave_up))
        elif entry.is_behind or entry.first_passed:
            left_out.append(why_left_out(lesson, entry, next(iter(proofs.values()), None), now))
    if not found:
        reasons = left_out or [f"no lesson has passed here yet; begin with: {COMMAND} start {lessons[0].number}"]
        raise CourseError(f"nothing to certify: {'; '.join(reasons)}")
    commit = commit_of(places.root)
    return Certificate(name, today(), __version__, commit, complete(tracks, found), found), left_out


def clean_name(text: str) -> str:
    """Return a name in one line and in Unicode's usual form.

    Raises:
        CourseError: it is empty, longer than a line or two, or has characters that cannot be printed.
    """
    name = " ".join(unicodedata.normalize("NFC", text).split())
    if not name:
        raise CourseError('the name is empty; give the one to print: --name "Ada Lovelace"')
    if len(name) > LONGEST_NAME:
        raise CourseError(f"the name has {len(name)} characters; at most {LONGEST_NAME} fit on the page")
    odd = next((sign for sign in name if not (sign.isprintable() or sign in JOINERS)), None)
    if odd:
        raise CourseError(f"the name has a character that cannot be printed: U+{ord(odd):04X}")
    return name


def why_left_out(lesson: Lesson, entry: Entry, proof: Proof | None, now: Mapping[str, str]) -> str:
    """Say why a lesson that passed once is not in the certificate, and what to do."""
    again = f"check it again: {COMMAND} check {lesson.number}"
    if proof is None and not entry.is_behind:
        return f"lesson {lesson.number} passed on {entry.first_passed}, and not in its last check; {again}"
    if proof is None:
        date = entry.passed or entry.core_passed
        return f"lesson {lesson.number} passed on {date}, and no record says with which files; {again}"
    changed = sorted(module for module in {*proof.files, *now} if proof.files.get(module) != now.get(module))
    names = ", ".join(module.rpartition("/")[2] for module in changed)
    return f"lesson {lesson.number} passed on {proof.date}, and {names} has changed since; {again}"


def complete(tracks: Sequence[Track], passed: Sequence[Passed]) -> dict[str, str]:
    """Return the tracks of which every lesson passed, with the least part in which one of them did."""
    parts = {one.number: one.part for one in passed}
    return {
        track.id: max((parts[number] for number in track.lessons), key=PARTS.index)
        for track in tracks
        if parts.keys() >= set(track.lessons)
    }
