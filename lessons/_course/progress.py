"""Course machinery. Stores the student's progress in `work/progress.json`, by lesson id.

Entries of lessons that this checkout does not know are kept unchanged, so switching to another commit loses nothing.
"""

import json
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path

from lessons._course.catalog import Lesson, Task
from lessons._course.places import CourseError


@dataclass
class Entry:
    """One lesson's progress.

    starters: for each module, the reference's `signatures` and `fingerprint` when the student started.
    core_passed: when the core's tasks did; `passed` is for all of them. first_passed: survives a reset.
    proofs: what these checks proved, as a `Proof`, by the part of the lesson that passed: "whole" or "core".
    """

    started: str = ""
    tasks_done: list[int] = field(default_factory=list)
    tests_passed: int = 0
    tests_total: int = 0
    core_passed: str = ""
    passed: str = ""
    first_passed: str = ""
    not_checked: list[str] = field(default_factory=list)
    hints: dict[str, int] = field(default_factory=dict)
    gave_up: bool = False
    starters: dict[str, dict] = field(default_factory=dict)
    proofs: dict[str, dict] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: object) -> "Entry":
        """Read an entry from JSON; values of the wrong type are replaced by their defaults."""
        default = cls()
        known = raw if isinstance(raw, dict) else {}
        same = {f.name: known[f.name] for f in fields(cls) if type(known.get(f.name)) is type(getattr(default, f.name))}
        return cls(**same)

    @property
    def solution_is_open(self) -> bool:
        return bool(self.first_passed) or self.gave_up

    @property
    def is_behind(self) -> bool:
        """Whether the student can go on from here: the lesson passed, or its core."""
        return bool(self.passed or self.core_passed)

    def fresh_start(self) -> "Entry":
        """Return the entry that remains after a reset."""
        return Entry(started=today(), first_passed=self.first_passed, gave_up=self.gave_up)

    def next_task(self, lesson: Lesson) -> Task | None:
        return next((task for task in lesson.tasks if task.number not in self.tasks_done), None)


class Progress:
    """The progress file, replaced atomically on each save.

    A check takes up to a minute and `watch` runs for hours, while other commands save in other terminals. So a save
    reads the file again and writes only what has changed since its entry was read.
    """

    def __init__(self, work: Path) -> None:
        self.path = work / "progress.json"
        self.warning = ""
        self.raw = self._read({"version": 1, "lessons": {}})

    def entry(self, lesson: Lesson) -> Entry:
        """Return a copy of the lesson's entry, as it was when the file was last read."""
        return Entry.parse(deepcopy(self.raw["lessons"].get(lesson.id)))

    def save(self, lesson: Lesson, entry: Entry) -> None:
        """Write what has changed in `entry`. Other entries, and unknown keys of this one, are kept.

        Raises:
            CourseError: the folder is not writable.
        """
        before = asdict(self.entry(lesson))
        changed = {key: value for key, value in asdict(entry).items() if value != before[key]}
        self.raw = self._read(self.raw)
        kept = self.raw["lessons"].get(lesson.id)
        known = asdict(self.entry(lesson))
        self.raw["lessons"][lesson.id] = (kept if isinstance(kept, dict) else {}) | known | changed
        text = json.dumps(self.raw, indent=2) + "\n"
        beside = self.path.with_suffix(".json.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(text, encoding="utf-8")
            beside.replace(self.path)
        except OSError as error:
            raise CourseError(f"Your progress cannot be written to {self.path}: {error.strerror}.") from None

    def _read(self, otherwise: dict) -> dict:
        """Return the file's contents, or `otherwise` if there is no file or it cannot be read."""
        if not self.path.exists():
            return otherwise
        try:
            raw = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(raw, dict) and isinstance(raw.get("lessons"), dict):
                return raw
        except (OSError, ValueError):
            pass
        kept = free_name(self.path, "broken")
        self.path.replace(kept)
        self.warning = f"{self.path.name} could not be read; it was renamed to {kept.name}, and progress starts over."
        return otherwise


def free_name(path: Path, word: str) -> Path:
    """Return an unused name beside `token_flat.py`: `token_flat.old.py`, `token_flat.old-2.py` and so on."""
    tries = [path.with_name(f"{path.stem}.{word}{path.suffix}")]
    while tries[-1].exists():
        tries.append(path.with_name(f"{path.stem}.{word}-{len(tries) + 1}{path.suffix}"))
    return tries[-1]


def today() -> str:
    return date.today().isoformat()
