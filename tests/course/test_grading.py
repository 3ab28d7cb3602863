"""Course machinery. Grading: a solved, a half-solved and a broken folder get the points that they deserve.

Protects students from a grade that another file, an earlier check or the machine decided, and teachers from a result
that their grading system does not read.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

from scripts import ROOT, autograder
from scripts import grade as grade_script
from scripts.grade import expanded
from scripts.grading.checks import copy_sources, grade, verdict_in
from scripts.grading.formats import classroom50, gradescope, totals
from scripts.grading.points import Graded, Item

import pytest
import yaml

from lessons._course.handed_in import work_folder
from lessons._course.places import ROOT_VARIABLE
from mini_engine.base.errors import UserError
from tests.course.toy import Toy
from tests.support import ran

RUNNER = {  # what Classroom 50's runner sets
    "CLASSROOM": "kv",
    "ASSIGNMENT": "lesson-0",
    "USERNAME": "ada",
    "SUBMISSION_TAG": "submit/2026-11-24T10-00-00Z-abc1234",
    "COMMIT_URL": "https://example.org/commit/abc",
    "RELEASE_URL": "https://example.org/release",
}


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Toy:
    toy = Toy(tmp_path / "course")
    monkeypatch.setenv(ROOT_VARIABLE, str(toy.places.root))
    return toy


def graded(toy: Toy, seconds: float = 60) -> Graded:
    return grade(toy.lesson, toy.places, toy.places.work, seconds)


def end_with(toy: Toy, line: str) -> None:
    """Write every task, and one line more."""
    toy.write(1, 2, 3)
    with toy.file.path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def earned(found: Graded) -> list[tuple[str, int]]:
    return [(item.state, item.points) for item in found.items]


# Points


def test_a_solved_folder_gets_all_points(toy):
    toy.write(1, 2, 3)
    found = graded(toy)
    assert earned(found) == [("done", 10)] * 3 + [("equal", 15)] and found.points == found.most == 45
    assert not found.finding


def test_a_half_solved_folder_gets_the_points_of_what_is_right(toy):
    toy.write(1, 3)
    assert earned(graded(toy)) == [("done", 10), ("not written", 0), ("done", 10), ("not checked", 0)]


def test_of_the_core_alone_the_tasks_beyond_it_neither_count_nor_stand_in_the_way_of_the_tokens(toy):
    toy.edit("lessons/l0_toy/lesson.toml", "[tasks.3]", "[tasks.3]\nmore = true")
    toy.write(1, 2)
    found = grade(toy.lesson, toy.places, toy.places.work, 60, core=True)
    assert earned(found) == [("done", 10)] * 2 + [("equal", 10)] and not found.finding
    toy.write(2)
    found = grade(toy.lesson, toy.places, toy.places.work, 60, core=True)
    assert earned(found) == [("not written", 0), ("done", 10), ("not checked", 0)] and "Task 1" in found.finding


def test_a_wrong_task_costs_its_points_and_is_explained(toy):
    toy.write_wrong("self.free[:n], self.free[n:]", "self.free[-n:], self.free[:-n]")
    found = graded(toy)
    assert earned(found)[0] == ("done", 10) and earned(found)[1] == ("failing", 0)
    assert "lowest free seats go first" in found.finding and str(toy.places.work) not in found.finding


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("def (", "Syntax error"),
        ("import nothing_of_that_name", "nothing_of_that_name"),
        ("import os; os._exit(0)", "Python itself stopped"),
        ('print(\'{"passed": true, "tasks": [], "smoke": {}, "advice": {}}\'); 1 / 0', "ZeroDivisionError"),
    ],
)
def test_a_broken_folder_gets_none_and_says_why(toy, line, says):
    end_with(toy, line)
    found = graded(toy)
    assert found.points == 0 and found.most == 45 and says in found.finding
    assert "Traceback" not in found.finding


def test_nothing_handed_in_is_no_points_and_a_sentence(toy):
    found = graded(toy)
    assert found.points == 0 and {state for state, _ in earned(found)} == {"not handed in"}
    assert found.finding == "Nothing was handed in: there is no folder l0."


@pytest.mark.nightly
def test_code_that_never_ends_gets_none(toy):
    end_with(toy, "while True: pass")
    found = graded(toy, seconds=3)
    assert found.points == 0 and "Time ran out" in found.finding


# What does not count


def test_the_progress_file_is_not_believed_and_not_changed(toy):
    toy.write()
    claims = {"version": 1, "lessons": {"l0_toy": {"started": "x", "tasks_done": [1, 2, 3], "passed": "x"}}}
    (toy.places.work / "progress.json").write_text(json.dumps(claims), encoding="utf-8")
    assert graded(toy).points == 0
    assert json.loads((toy.places.work / "progress.json").read_text(encoding="utf-8")) == claims
    assert sorted(path.name for path in toy.places.work.rglob("*")) == ["l0", "progress.json", "seats.py"]


def test_a_link_to_the_reference_is_not_an_answer(toy, tmp_path):
    reference = toy.places.root / "mini_engine" / "kv" / "seats.py"
    (folder := toy.places.work / "l0").mkdir(parents=True)
    try:
        (folder / "seats.py").symlink_to(reference)
    except OSError:
        pytest.skip("this system has no symbolic links for this user")
    copy_sources(folder, tmp_path / "copy")
    assert not (tmp_path / "copy").exists() and graded(toy).points == 0
    shutil.rmtree(folder)
    folder.symlink_to(reference.parent)
    assert graded(toy).points == 0


def test_a_test_that_the_student_changed_is_not_run(toy):
    toy.write_wrong("return 2 * x", "return 3 * x")
    own = toy.places.work / "l0" / "tests" / "l0" / "test_seats.py"
    own.parent.mkdir(parents=True)
    own.write_text("def test_all_is_well():\n    pass\n", encoding="utf-8")
    assert earned(graded(toy))[0] == ("failing", 0)


@pytest.mark.parametrize("output", ["", "hello", '{"passed": true}', "[1, 2]\n"])
def test_what_is_no_verdict_is_not_taken_for_one(output):
    assert verdict_in(output) is None


# Formats

ITEMS = (Item(1, "Double | treble", "done", 10, 10), Item(0, "tokens equal", "differs", 0, 15))
FOUND = [Graded(0, "Seats", ITEMS, "Line one\n    line two", 3.6), Graded(1, "Later", ITEMS[:1], "", 1.0)]


def test_gradescope_reads_it():
    told = json.loads(json.dumps(gradescope(FOUND)))
    allowed = {"score", "max_score", "name", "number", "output", "status", "visibility"}
    assert {key for test in told["tests"] for key in test} == allowed
    assert sum(test["score"] for test in told["tests"]) == totals(FOUND)[0] and "score" not in told
    assert {test["status"] for test in told["tests"]} == {"passed", "failed"} and told["execution_time"] == 5
    numbers = [test["number"] for test in told["tests"]]
    assert len(set(numbers)) == len(numbers), "Gradescope lists them by number"


def test_classroom50_reads_it():
    told = json.loads(json.dumps(classroom50(FOUND, RUNNER)))
    required = {"schema", "classroom", "assignment", "assignment_type", "owner", "submission", "commit", "release"}
    assert told.keys() == required | {"review", "datetime", "score", "max-score", "tests"}, "it allows no other key"
    assert all(told[key] for key in required) and told["schema"] == "classroom50/result/v1"
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z", told["datetime"])
    assert (told["score"], told["max-score"]) == (20, 35) and type(told["score"]) is int
    for test in told["tests"]:
        assert {"test-name", "passed", "score", "max-score"} <= test.keys() and test["score"] <= test["max-score"]


# Commands


def test_a_class_is_a_table_and_a_file(toy, tmp_path, capsys):
    for name, tasks in {"ada": (1, 2, 3), "bob": (1,)}.items():
        toy.write(*tasks)
        shutil.copytree(toy.places.work, tmp_path / "in" / name / "work")
    summary, points = tmp_path / "summary.md", tmp_path / "deep" / "points.json"
    options = ["--lessons", "0", "--summary", summary, "--json-file", points, "--fail-under", "50"]
    folders = [tmp_path / "in" / "ada", tmp_path / "in" / "bob" / "work"]
    code, out, err = ran(grade_script.main, *folders, *options, capsys=capsys)
    assert code == 1 and "less than 50 %: bob" in err and "graded: ada, lesson 0" in err
    assert re.search(r"ada +45 of 45 +45 of 45", out) and re.search(r"bob +10 of 45", out)
    told = json.loads(points.read_text(encoding="utf-8"))
    assert {who: found["points"] for who, found in told.items()} == {"ada": 45, "bob": 10}
    assert "## ada: 45 of 45 points" in (said := summary.read_text(encoding="utf-8")) and "## bob: 10" in said


def test_a_submission_s_results_go_where_the_system_looks(toy, tmp_path, capsys, monkeypatch):
    toy.write(1, 2, 3)
    monkeypatch.chdir(toy.places.work.parent)
    code, out, _ = ran(autograder.main, "--lessons", "0", "--format", "classroom50", capsys=capsys)
    assert code == 0 and out.startswith("45 of 45 points")
    assert json.loads(Path("result.json").read_text(encoding="utf-8"))["score"] == 45
    options = ["--lessons", "0", "--submission", toy.places.work, "--results", tmp_path / "results" / "results.json"]
    assert ran(autograder.main, *options, capsys=capsys)[0] == 0
    assert len(json.loads((tmp_path / "results" / "results.json").read_text(encoding="utf-8"))["tests"]) == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "--lessons", "0"], "nowhere is not a folder"),
        ([".", "--lessons", "99"], "no lesson '99'"),
        ([".", "--lessons", ","], "at least one lesson"),
        ([".", "--lessons", "0", "--fail-under", "101"], "'101' is not a percentage"),
        ([".", "."], "--lessons"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(toy, arguments, says, capsys):
    code, out, err = ran(grade_script.main, *arguments, capsys=capsys)
    assert code == 2 and not out and says in err and err.count("\n") == 1


def test_a_pattern_that_the_shell_left_is_expanded(tmp_path):
    for name in ("bob", "ada", "[c]"):
        (tmp_path / name).mkdir()
    assert [path.name for path in expanded([tmp_path / "*"])] == ["[c]", "ada", "bob"]
    assert expanded([tmp_path / "[c]"]) == [tmp_path / "[c]"], "a folder of that name is no pattern"
    assert expanded([tmp_path / "none*"]) == [tmp_path / "none*"], "and what matches nothing is named in the error"


def test_two_students_of_one_name_are_told_apart(toy, tmp_path, capsys):
    for group in "ab":
        (tmp_path / group / "ada").mkdir(parents=True)
    folders = [tmp_path / "a" / "ada", tmp_path / "b" / "ada"]
    assert "same name" in ran(grade_script.main, *folders, "--lessons", "0", capsys=capsys)[2]


def test_a_folder_that_holds_work_or_is_work_will_do(tmp_path):
    (tmp_path / "ada" / "work").mkdir(parents=True)
    assert work_folder(tmp_path / "ada") == work_folder(tmp_path / "ada" / "work") == tmp_path / "ada" / "work"
    with pytest.raises(UserError, match="not a folder"):
        work_folder(tmp_path / "bob")


# The workflow to copy


def test_the_workflow_grades_with_options_that_exist_and_the_course_s_tests():
    job = yaml.safe_load((ROOT / "lessons/classroom/grade.yml").read_text(encoding="utf-8"))["jobs"]["grade"]
    [line] = [step["run"] for step in job["steps"] if "scripts/grade.py" in step.get("run", "")]
    words = shlex.split(line)
    arguments = words[words.index("scripts/grade.py") + 1 :]
    given = [{"$LESSONS": "0,1", "$FAIL_UNDER": "0"}.get(word, word) for word in arguments]
    args = grade_script.make_parser().parse_args(given)
    assert args.folders == [Path("../handed-in/*")] and args.summary and args.json_file
    paths = [step["with"]["path"] for step in job["steps"] if step.get("uses", "").startswith("actions/checkout")]
    assert paths == ["handed-in/${{ github.event.repository.name }}", "course"]
    folders = {step["working-directory"] for step in job["steps"] if "run" in step}
    assert folders == {"course"}, "what runs is the course's, and not the student's"
