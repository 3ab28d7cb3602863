"""Course machinery. Reads and validates each `lesson.toml`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from lessons._course.places import CourseError, Places


@dataclass(frozen=True)
class Target:
    """A function or method to be written in a task: `mini_engine/kv/token_flat.py::FlatKvPool.set_kv`."""

    file: str
    symbol: str

    @classmethod
    def parse(cls, text: str) -> "Target":
        file, _, symbol = text.partition("::")
        if not file or not symbol:
            raise CourseError(f"{text!r} is not a target; write it as file::symbol")
        return cls(file, symbol)


@dataclass(frozen=True)
class Task:
    number: int
    title: str
    targets: tuple[Target, ...]
    lines: int
    hints: tuple[str, ...]
    is_more: bool = False  # beyond the lesson's core: `check --core` takes the reference's body

    @property
    def size(self) -> str:
        return "about 1 line" if self.lines == 1 else f"about {self.lines} lines"

    @property
    def symbols(self) -> str:
        return ", ".join(target.symbol for target in self.targets)


@dataclass(frozen=True)
class Bug:
    """A pitfall of the page as a small code change. With it, one of `tests` fails and its output matches `symptom`."""

    pitfall: str
    module: str
    find: str
    replace: str
    tests: tuple[str, ...]
    symptom: str


@dataclass(frozen=True)
class Sitting:
    """What is done in one go: the tasks after the sitting before, up to `last_task`. title: what works then."""

    minutes: int
    last_task: int
    title: str = ""


@dataclass(frozen=True)
class Lesson:
    id: str
    number: int
    title: str
    summary: str
    sittings: tuple[Sitting, ...]
    needs: tuple[int, ...]
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    smoke: tuple[str, ...]
    tasks: tuple[Task, ...]
    bugs: tuple[Bug, ...]
    folder: Path

    def task(self, number: int) -> Task:
        for task in self.tasks:
            if task.number == number:
                return task
        numbers = ", ".join(str(task.number) for task in self.tasks) or "none"
        raise CourseError(f"Lesson {self.number} has no task {number}; its tasks: {numbers}.")

    def tasks_in(self, module: str) -> dict[str, Task]:
        """Map the symbols of `module` that are tasks to those tasks."""
        return {target.symbol: task for task in self.tasks for target in task.targets if target.file == module}

    @property
    def minutes(self) -> int:
        return sum(sitting.minutes for sitting in self.sittings)

    @property
    def core(self) -> frozenset[int]:
        """The numbers of the core's tasks; the others are marked `more`."""
        return frozenset(task.number for task in self.tasks if not task.is_more)

    @property
    def core_minutes(self) -> int:
        """Without the sittings whose tasks are all `more`."""
        firsts = [0, *(sitting.last_task for sitting in self.sittings)]
        return sum(
            sitting.minutes
            for before, sitting in zip(firsts, self.sittings, strict=False)
            if self.core & set(range(before + 1, sitting.last_task + 1))
        )

    @property
    def page(self) -> Path:
        return self.folder / "README.md"


def read_lesson(path: Path) -> Lesson:
    """Read one lesson.toml.

    Raises:
        CourseError: the file is not valid TOML, lacks a key, or contradicts itself.
    """
    try:
        return _lesson(tomllib.loads(path.read_text(encoding="utf-8")), path.parent)
    except KeyError as error:
        raise CourseError(f"{path}: the key {error} is missing") from None
    except ValueError as error:
        raise CourseError(f"{path}: {error}") from None


def read_lessons(places: Places) -> list[Lesson]:
    """Return all lessons, sorted by number."""
    lessons = [read_lesson(path) for path in places.lessons.glob("*/lesson.toml")]
    keys: dict[str, list[object]] = {"number": [x.number for x in lessons], "id": [x.id for x in lessons]}
    for what, values in keys.items():
        twice = {value for value in values if values.count(value) > 1}
        if twice:
            raise CourseError(f"two lessons have the {what} {twice.pop()!r}")
    return sorted(lessons, key=lambda lesson: lesson.number)


def choose(lessons: list[Lesson], name: str) -> Lesson:
    """Return the lesson called `name`: its number ("2", "l2") or its id."""
    for lesson in lessons:
        if name.lower() in (str(lesson.number), f"l{lesson.number}", lesson.id):
            return lesson
    if not lessons:
        raise CourseError("No lessons found here; is this the course's repository?")
    numbers = f"{lessons[0].number} to {lessons[-1].number}"
    raise CourseError(f"There is no lesson {name!r}; the lessons are numbered {numbers}.")


def _lesson(raw: dict, folder: Path) -> Lesson:
    lesson = Lesson(
        id=raw["id"],
        number=raw["number"],
        title=raw["title"],
        summary=raw["summary"],
        sittings=_sittings(raw),
        needs=tuple(raw.get("needs", ())),
        modules=tuple(raw["modules"]),
        tests=tuple(raw["tests"]),
        smoke=tuple(raw.get("smoke", ())),
        tasks=tuple(_task(int(number), entry) for number, entry in raw.get("tasks", {}).items()),
        bugs=tuple(bug for pitfall, entries in raw.get("pitfalls", {}).items() for bug in _bugs(pitfall, entries)),
        folder=folder,
    )
    _check_modules(lesson)
    _check_tasks(lesson)
    return lesson


def _sittings(raw: dict) -> tuple[Sitting, ...]:
    """Return the lesson's sittings: one of `minutes`, or those that the file lists."""
    if "sittings" not in raw:
        return (Sitting(raw["minutes"], len(raw.get("tasks", {}))),)
    return tuple(Sitting(each["minutes"], each["last_task"], each["title"]) for each in raw["sittings"])


def _task(number: int, raw: dict) -> Task:
    targets = raw["targets"] if "targets" in raw else [raw["target"]]
    return Task(
        number=number,
        title=raw["title"],
        targets=tuple(Target.parse(text) for text in targets),
        lines=raw["lines"],
        hints=tuple(raw["hints"]),
        is_more=raw.get("more", False),
    )


def _bugs(pitfall: str, raw: dict | list[dict]) -> list[Bug]:
    """Return a pitfall's bugs: one table, or a list of several."""
    entries = raw if isinstance(raw, list) else [raw]
    return [
        Bug(pitfall, bug["module"], bug["find"], bug["replace"], tuple(bug["tests"]), bug["symptom"]) for bug in entries
    ]


def _check_modules(lesson: Lesson) -> None:
    own = f"lessons/{lesson.id}/"
    for module in lesson.modules:
        if not module.startswith(("mini_engine/", own)) or not module.endswith(".py") or module.endswith("__init__.py"):
            raise CourseError(f"{module!r} cannot be a student's module; name a file mini_engine/….py or {own}….py")


def _check_tasks(lesson: Lesson) -> None:
    numbers = [task.number for task in lesson.tasks]
    if numbers != list(range(1, len(numbers) + 1)):
        raise CourseError(f"tasks are numbered {numbers}; number them 1, 2, 3 in order")
    for task in lesson.tasks:
        if len(task.hints) != 3:
            raise CourseError(f"task {task.number} must have 3 hints, not {len(task.hints)}")
        for target in task.targets:
            if target.file not in lesson.modules:
                raise CourseError(f"task {task.number} is in {target.file}, which is not in modules")
    ends = [sitting.last_task for sitting in lesson.sittings]
    if ends != sorted(set(ends)) or ends[-1] != len(numbers):
        raise CourseError(f"sittings end with the tasks {ends}; they must go up, to the last task, {len(numbers)}")
    targets = [target for task in lesson.tasks for target in task.targets]
    if len(set(targets)) != len(targets):
        raise CourseError("two tasks share a target")
