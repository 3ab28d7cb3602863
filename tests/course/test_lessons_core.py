"""Course machinery. Stops within a lesson, and its core: what is not written, or beyond it, is the reference's."""

import importlib
import json

import pytest

from lessons._course.places import CHILD
from tests.course.toy import Toy, check, states, words

SITTINGS = """sittings = [
    {minutes = 3, last_task = 1, title = "numbers double"},
    {minutes = 4, last_task = 3, title = "seats come back"},
]"""


@pytest.fixture
def toy(tmp_path) -> Toy:
    """The toy course with a stop after task 1, and a task beyond the core."""
    toy = Toy(tmp_path)
    toy.edit("lessons/l0_toy/lesson.toml", "minutes = 5", SITTINGS)
    toy.edit("lessons/l0_toy/lesson.toml", "[tasks.3]", "[tasks.3]\nmore = true")
    return toy


def test_at_a_stop_the_tokens_are_compared_with_the_references_bodies_for_the_rest(toy):
    toy.write(1)
    verdict = check(toy)
    assert verdict.advice.result.status == "stop" and not verdict.passed, words(verdict)
    assert verdict.report.smoke.state == "equal" and states(verdict) == ["done", "left out", "left out"]
    assert "stop 1 of 2: numbers double" in words(verdict) and "task 2: Hand out seats" in words(verdict)
    assert toy.run("check", "0").code == 1, "a stop is not the end"


def test_between_two_stops_the_tests_of_what_is_written_run_alone(toy):
    toy.edit("lessons/l0_toy/lesson.toml", "last_task = 1", "last_task = 2")
    toy.write(1)
    verdict = check(toy)
    assert states(verdict) == ["done", "not written", "not written"] and verdict.report.smoke.state == "NOT CHECKED"


def test_the_core_passes_without_the_tasks_beyond_it(toy):
    toy.write(1, 2)
    assert check(toy).advice.result.status == "core", "only what is beyond the core is missing"
    said = toy.run("check", "0", "--core", "--json")
    assert said.code == 0 and json.loads(said.out)["core_passed"] and not json.loads(said.out)["passed"]
    row = json.loads(toy.run("--json").out)["lessons"][0]
    assert row["core_passed"] and not row["passed"] and row["tasks_done"] == [1, 2]
    assert "core passed" in toy.run().out and "start 1" in toy.run().out, "lesson 1 needs no more than the core"
    toy.write(2)
    assert toy.run("check", "0", "--core").code == 1, "task 1 is the core's"


def test_a_wrong_body_beyond_the_core_leaves_the_core_as_it_is(toy):
    toy.write_wrong("self.free.append(seats[-1])", "self.free.append(seats[0] + 1)")
    assert toy.run("check", "0", "--core").code == 0
    assert toy.run("check", "0").code == 1, "without --core the body counts"
    assert json.loads(toy.run("--json").out)["lessons"][0]["core_passed"]


def test_a_check_of_the_core_keeps_that_all_has_passed(toy):
    toy.write(1, 2, 3)
    assert check(toy).passed and check(toy, core=True).report.core_passed
    row = json.loads(toy.run("--json").out)["lessons"][0]
    assert row["passed"] and row["tasks_done"] == [1, 2, 3]


def test_a_students_lines_keep_their_numbers_behind_a_body_that_was_put_in(toy):
    toy.write(1)
    toy.edit("work/l0/seats.py", "return 2 * x", "return 2 * y")
    line = toy.file.source.splitlines().index("def double(x: int) -> int: return 2 * y") + 1
    assert f":{line}" in check(toy).advice.where


def test_a_body_that_was_put_in_may_call_the_class_above(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(CHILD))
    course_filled = importlib.import_module("course_filled")
    source = "class A:\n    def f(self): return 1\n\n\nclass B(A):\n    def f(self):\n        {}\n"
    (tmp_path / "reference.py").write_text(source.format("return super().f() + 1"), encoding="utf-8")
    told = {"a": {"reference": str(tmp_path / "reference.py"), "symbols": ["B.f"]}}
    monkeypatch.setenv(course_filled.FILLED, json.dumps(told))
    names: dict = {}
    tree = course_filled.filled("a", source.format("raise NotImplementedError").encode(), "a.py")
    exec(compile(tree, "a.py", "exec"), names)
    assert names["B"]().f() == 2
