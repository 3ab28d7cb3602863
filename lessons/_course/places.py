"""Course machinery. Where things are: the repository, its lessons, the student's own files."""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT_VARIABLE = "KV_COURSE_ROOT"
WORK_VARIABLE = "KV_COURSE_WORK"
CHILD = Path(__file__).resolve().parent / "child"


class CourseError(ValueError):
    """Something the person at the keyboard can mend, said in one sentence."""


@dataclass(frozen=True)
class Places:
    """The repository's root and the folder of the student's files (`work/`, which git ignores)."""

    root: Path
    work: Path

    @classmethod
    def find(cls) -> "Places":
        """From this file's own place, unless KV_COURSE_ROOT or KV_COURSE_WORK say otherwise."""
        root = Path(os.environ.get(ROOT_VARIABLE) or Path(__file__).resolve().parents[2]).resolve()
        work = Path(os.environ.get(WORK_VARIABLE) or root / "work").resolve()
        return cls(root, work)

    @property
    def lessons(self) -> Path:
        return self.root / "lessons"

    def shown(self, path: Path | str) -> str:
        """A path as a person would type it from the root, with forward slashes."""
        path = Path(path)
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
