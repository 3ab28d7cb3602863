"""Course machinery. `scripts/refused.py` collects enough to see the refusal, and nothing that should stay private.

Protects students who send it: their progress, their other tasks and the names of their folders are not in it.
"""

import json

from scripts import refused
from scripts.refused import collect, markdown

import pytest

from lessons._course.places import ROOT_VARIABLE, WORK_VARIABLE
from mini_engine.base.errors import UserError
from tests.course.toy import Toy


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Toy:
    toy = Toy(tmp_path / "course")
    for name, value in toy.environment.items():
        monkeypatch.setenv(name, value)
    assert {ROOT_VARIABLE, WORK_VARIABLE} == toy.environment.keys()
    return toy


def test_it_shows_the_refusal_and_the_answer_of_that_task_only(toy, tmp_path):
    toy.write_wrong("self.free[:n], self.free[n:]", "self.free[-n:], self.free[:-n]")
    (toy.places.work / "diary.py").write_text("SECRET = 1\n", encoding="utf-8")
    found = collect(toy.lesson, toy.places, 60)
    text = markdown(found)
    assert found["task"] == 2 and "### Lesson 0, task 2" in text
    assert "the lowest free seats go first" in text and "self.free[-n:]" in text
    assert "def give_back" not in text and "SECRET" not in text and "diary" not in text
    assert str(tmp_path) not in json.dumps(found), "no path of the student's machine"
    assert not (toy.places.work / "progress.json").exists(), "it is not a check of the student's"


def test_a_file_that_python_cannot_read_is_shown_whole(toy):
    toy.write(1, 2, 3)
    toy.file.path.write_text("def (\n", encoding="utf-8")
    assert collect(toy.lesson, toy.places, 60)["answer"] == "# seats.py\ndef (\n"


@pytest.mark.parametrize(
    ("tasks", "says"),
    [((1, 2, 3), "the lesson passes, so no answer is refused"), ((), "the next task is not written yet")],
)
def test_where_nothing_is_refused_it_says_so(toy, tasks, says):
    toy.write(*tasks)
    with pytest.raises(UserError, match=says):
        collect(toy.lesson, toy.places, 60)


def test_before_the_start_it_names_the_command(toy):
    with pytest.raises(UserError, match="python -m lessons start 0"):
        collect(toy.lesson, toy.places, 60)


def test_the_command_writes_a_file_and_names_the_form(toy, tmp_path, capsys):
    toy.write_wrong("return 2 * x", "return 3 * x")
    assert refused.main(["0", "--out", str(tmp_path / "refused.md")]) == 0
    said = capsys.readouterr()
    assert not said.out and refused.FORM in said.err
    assert "return 3 * x" in (tmp_path / "refused.md").read_text(encoding="utf-8")
    assert refused.main(["0,1"]) == 2 and "several lessons" in capsys.readouterr().err
