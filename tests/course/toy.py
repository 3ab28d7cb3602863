"""Course machinery. A toy course of two lessons, without torch, for testing the commands."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lessons._course.catalog import Lesson, read_lessons
from lessons._course.cli import main
from lessons._course.places import ROOT_VARIABLE, WORK_VARIABLE, Places
from lessons._course.progress import Progress
from lessons._course.runner import Launch
from lessons._course.student import StudentFile, starter_of, student_files
from lessons._course.verdict import Verdict, judge
from lessons._course.warm import warm_launch

WARM = warm_launch()

SEATS = '''"""Lesson 0. A toy: numbered seats, handed out and taken back."""

from dataclasses import dataclass

FIRST = 0  # the lowest seat


@dataclass
class Ticket:
    """A seat and its row."""

    seat: int
    row: int = 0


class Seats:
    """Seats 0 … count - 1; the lowest free one goes first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(FIRST, count))

    def take(
        self,
        n: int,  # how many
    ) -> list[int]:
        """Hand out n seats.

        Raises:
            ValueError: fewer seats are free; nothing was changed.
        """
        # secret: look before you take
        if n > len(self.free):
            raise ValueError(f"need {n} seats, {len(self.free)} free of {self.count}")
        taken, self.free = self.free[:n], self.free[n:]
        return taken
        # secret: after the return

    # no secret: between two methods
    def give_back(self, seats: list[int]) -> None:
        """Take seats back, each once."""
        for seat in seats:
            if seat in self.free:
                raise ValueError(f"seat {seat} is free already")
        while seats:
            seats = seats[:-1] if self.free.append(seats[-1]) is None else seats


def double(x: int) -> int: return 2 * x
'''

TESTS = """import pytest

from mini_engine.kv.seats import Seats, double


@pytest.mark.task(2)
def test_take_hands_out_the_lowest():
    assert Seats(4).take(2) == [0, 1], "the lowest free seats go first"


@pytest.mark.task(2)
def test_take_refuses_and_changes_nothing():
    seats = Seats(2)
    with pytest.raises(ValueError, match="need 3 seats, 2 free"):
        seats.take(3)
    assert seats.free == [0, 1], "a call that cannot be carried out changes nothing"


@pytest.mark.task(3)
def test_give_back_makes_free():
    seats = Seats(0)
    seats.give_back([3, 5])
    assert sorted(seats.free) == [3, 5], "what is given back is free again"


@pytest.mark.task(1)
@pytest.mark.parametrize("x", [1, 5])
def test_double(x):
    assert double(x) == 2 * x, "double means twice as much"


def test_of_no_task_in_particular():
    assert Seats(3).count == 3


@pytest.mark.skip(reason="needs a unicorn")
def test_skipped():
    pass
"""

SMOKE = '''"""Lesson 0. The toy's smoke script."""

import json
import sys

from mini_engine.kv.seats import Seats

ours = Seats(5).take(5)
hf = [0, 1, 2, 3, 4]
match = ours == hf
place = next((i for i, (a, b) in enumerate(zip(ours, hf)) if a != b), 0)
divergence = {"position": place, "expected": hf[place], "got": ours[place], "gap": 0.5, "where": "layer 7, attention"}
request = {"prompt_ids": [1], "ours": ours, "hf": hf, "match": match, "first_divergence": None if match else divergence}
print(json.dumps({"lesson": 0, "match": match, "requests": [request]}))
sys.exit(0 if match else 1)
'''

TOML = """id = "l0_toy"
number = 0
title = "Seats"
summary = "Hand out seats."
minutes = 5
needs = []
modules = ["mini_engine/kv/seats.py"]
tests = ["tests/l0"]
smoke = ["scripts/l0_smoke.py"]

[tasks.1]
target = "mini_engine/kv/seats.py::double"
title = "Double a number"
lines = 1
hints = ["think of two", "times", "return 2 * x"]

[tasks.2]
targets = ["mini_engine/kv/seats.py::Seats.take"]
title = "Hand out seats"
lines = 4
hints = ["look first", "then slice", "nearly the code"]

[tasks.3]
target = "mini_engine/kv/seats.py::Seats.give_back"
title = "Take seats back"
lines = 3
hints = ["a", "b", "c"]

[pitfalls."The last seats go first"]
module = "mini_engine/kv/seats.py"
find = "[:n], self.free[n:]"
replace = "[-n:], self.free[:-n]"
tests = ["tests/l0/test_seats.py::test_take_hands_out_the_lowest"]
symptom = "lowest free seats"
"""

LATER = """id = "l1_later"
number = 1
title = "Later"
summary = "Uses lesson 0."
minutes = 5
needs = [0]
modules = ["mini_engine/kv/later.py"]
tests = ["tests/l1"]
"""

TRACKS = """[tracks.core]
title = "Core"
idea = "a toy"
lessons = [0, 1]
"""

PYPROJECT = """[tool.pytest.ini_options]
addopts = "--import-mode=importlib"
pythonpath = ["."]
markers = ["task(number)"]
"""

FILES = {
    "mini_engine/__init__.py": '"""Course machinery."""\n',
    "mini_engine/kv/__init__.py": '"""Lesson 0."""\n',
    "mini_engine/kv/seats.py": SEATS,
    "mini_engine/kv/later.py": '"""Lesson 1. Later."""\n',
    "tests/l0/test_seats.py": TESTS,
    "tests/l1/test_later.py": "import mini_engine.kv.later\n\n\ndef test_later():\n    pass\n",
    "scripts/l0_smoke.py": SMOKE,
    "lessons/l0_toy/lesson.toml": TOML,
    "lessons/l0_toy/README.md": "# Seats\n",
    "lessons/l1_later/lesson.toml": LATER,
    "lessons/l1_later/README.md": "# Later\n",
    "lessons/tracks.toml": TRACKS,
    "pyproject.toml": PYPROJECT,
}


@dataclass
class Said:
    """A command's exit code and output."""

    code: int
    out: str
    err: str


class Toy:
    """The toy course, in its own folder."""

    def __init__(self, root: Path) -> None:
        for name, text in FILES.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        self.places = Places(root.resolve(), root.resolve() / "work")

    @property
    def lesson(self) -> Lesson:
        return read_lessons(self.places)[0]

    @property
    def file(self) -> StudentFile:
        return student_files(self.lesson, self.places)[0]

    @property
    def environment(self) -> dict[str, str]:
        return {ROOT_VARIABLE: str(self.places.root), WORK_VARIABLE: str(self.places.work)}

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text that occurs exactly once in a file of the course."""
        path = self.places.root / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {name}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def write(self, *tasks: int) -> None:
        """Write these tasks as the student, as in the reference."""
        self.file.path.parent.mkdir(parents=True, exist_ok=True)
        self.file.path.write_text(starter_of(self.lesson, self.file, keep=tasks), encoding="utf-8")

    def write_wrong(self, old: str, new: str) -> None:
        """Write all tasks as the student, with one change."""
        self.write(1, 2, 3)
        self.edit("work/l0/seats.py", old, new)

    def write_top(self, line: str) -> None:
        """Write all tasks as the student, with one more line at the top."""
        self.write_wrong("FIRST = 0", f"FIRST = 0\n{line}\n")

    def done(self, *tasks: int, **fields: Any) -> None:
        """Record these tasks as done, and other fields of the student's progress."""
        progress = Progress(self.places.work)
        progress.save(self.lesson, replace(progress.entry(self.lesson), tasks_done=list(tasks), **fields))

    def run(self, *arguments: str) -> Said:
        """Run `python -m lessons *arguments` in this process."""
        out, err = io.StringIO(), io.StringIO()
        with (
            patch.dict(os.environ, self.environment),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            try:
                code = main(arguments)
            except SystemExit as leave:
                code = leave.code or 0
        return Said(code, out.getvalue(), err.getvalue())


def check(toy: Toy, launch: Launch = WARM, **options: Any) -> Verdict:
    """Check the toy's lesson."""
    return judge(toy.lesson, toy.places, Progress(toy.places.work), launch=launch, **options)


def states(verdict: Verdict) -> list[str]:
    """Return the state of each task."""
    return [report.state for report in verdict.report.tasks]


def words(verdict: Verdict) -> str:
    """Return a verdict's advice as text."""
    advice = verdict.advice
    return "\n".join([advice.headline, advice.where, *advice.lines, *advice.commands])
