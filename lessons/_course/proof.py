"""Course machinery. What a passing check proves: these files passed at this commit. Kept in the progress file."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from lessons._course.commit import commit_of
from lessons._course.places import Places
from lessons._course.progress import today
from lessons._course.report import Report
from lessons._course.student import StudentFile

WHOLE, CORE = "whole", "core"
PARTS = (WHOLE, CORE)  # what of a lesson can pass, the larger one first


@dataclass(frozen=True)
class Proof:
    """What a check found when it passed.

    commit: the course's, as `commit_of` writes it.
    tasks: the numbers of the tasks that are done.
    tests_passed, tests_total: they differ by the tests that this machine cannot run.
    files: the digest of each of the student's files, by module.
    """

    date: str
    commit: str
    tasks: list[int]
    tests_passed: int
    tests_total: int
    files: dict[str, str]

    @classmethod
    def of(cls, report: Report, places: Places, files: dict[str, str]) -> "Proof | None":
        """Return what a check proves about `files`; None if the lesson's core did not pass."""
        if not report.core_passed:
            return None
        passed, total = report.count("passed"), len(report.results)
        return cls(today(), commit_of(places.root), report.tasks_done, passed, total, files)

    @classmethod
    def parse(cls, raw: object) -> "Proof | None":
        """Read a proof from JSON; None if it is not one."""
        try:
            proof = cls(**{field.name: raw[field.name] for field in fields(cls)})  # type: ignore[index]
            texts = [proof.date, proof.commit, *proof.files, *proof.files.values()]
            numbers = [*proof.tasks, proof.tests_passed, proof.tests_total]
        except (AttributeError, KeyError, TypeError):
            return None
        return proof if {*map(type, texts)} == {str} and {*map(type, numbers)} == {int} else None


def digests(files: Sequence[StudentFile]) -> dict[str, str]:
    """Return the digest of each of the student's files that exists, by module."""
    return {file.module: file.digest for file in files if file.path.is_file()}
