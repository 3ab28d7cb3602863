"""Course machinery. Paths: the repository, its lessons, the student's files."""

import os
from dataclasses import dataclass
from pathlib import Path

COMMAND = "python -m lessons"
ROOT_VARIABLE = "KV_COURSE_ROOT"
WORK_VARIABLE = "KV_COURSE_WORK"
CHILD = Path(__file__).resolve().parent / "child"


class CourseError(ValueError):
    """A problem that the user can fix, described in one sentence."""


@dataclass(frozen=True)
class Places:
    """The repository's root, and the folder of the student's files (`work/`, ignored by git)."""

    root: Path
    work: Path

    @classmethod
    def find(cls) -> "Places":
        """Derive both from this file's location, unless KV_COURSE_ROOT or KV_COURSE_WORK is set."""
        root = Path(os.environ.get(ROOT_VARIABLE) or Path(__file__).resolve().parents[2]).resolve()
        work = Path(os.environ.get(WORK_VARIABLE) or root / "work").resolve()
        return cls(root, work)

    @property
    def lessons(self) -> Path:
        return self.root / "lessons"

    def shown(self, path: Path | str) -> str:
        """Return a path as typed from the root, with forward slashes."""
        path = Path(path)
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
