"""Course machinery. `check` copes with odd files, and says what is odd about them.

Protects students whose file prints, loops, crashes or leaves Python: a check still ends and says what happened.
"""

import pytest

from tests.course.toy import check, words


@pytest.mark.parametrize("end", ["", "\\n"])
def test_a_stray_print_does_not_hide_the_smoke_scripts_result(toy, end):
    toy.write_top(f"print('debug {{', end='{end}')")
    verdict = check(toy)
    assert verdict.passed and verdict.report.smoke.state == "equal"
    assert [note.headline for note in verdict.notes] == ["Your code prints while it runs. That does no harm here."]
    assert verdict.notes[0].lines == ["debug {"]


def test_megabytes_of_output_are_cut(toy):
    toy.write_wrong("        return taken", "        print('x' * 3_000_000)\n        return [7]")
    said = words(check(toy))
    assert "Your code printed:" in said and len(said) < 2500, len(said)


@pytest.mark.parametrize(
    "line",
    [
        "import random; random.seed(1)",
        "import json; json.dumps = None",
        "import os; os._exit = None",
        "import builtins; builtins.open = None",
    ],
)
def test_what_a_file_replaces_does_not_break_the_check(toy, line):
    toy.edit("scripts/l0_smoke.py", "import json\n", "import json\nfrom json import dumps\n")
    toy.edit("scripts/l0_smoke.py", "json.dumps(", "dumps(")
    toy.write_top(line)
    assert check(toy).passed


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n"])
def test_an_empty_file_is_missing_everything(toy, text):
    toy.write()
    toy.file.path.write_text(text, encoding="utf-8")
    assert "is missing from your file." in check(toy).advice.headline


def test_a_folder_in_place_of_the_file_is_one_line(toy):
    toy.file.path.mkdir(parents=True)
    said = toy.run("check", "0")
    assert said.code == 2 and "work/l0/seats.py is not a file" in said.err and said.err.count("\n") == 1


def test_a_test_that_fails_with_the_reference_too_is_the_courses_fault(toy):
    toy.edit("tests/l0/test_seats.py", "    assert Seats(4).take(2) ==", "    assert Seats(4).tak(2) ==")
    toy.write(1, 2, 3)
    verdict = check(toy)
    assert verdict.advice.headline == "The course's own code is broken here, not yours: please report it."
    assert verdict.advice.result.status == "course_error" and not verdict.passed


def test_an_error_from_a_wrong_value_is_not_the_courses_fault(toy):
    toy.edit("tests/l0/test_seats.py", "Seats(4).take(2) ==", "Seats(4).take(2)[:] ==")
    toy.write_wrong("        return taken", "        pass")
    verdict = check(toy)
    assert verdict.advice.headline.startswith("Task 2 (Seats.take) raises TypeError: 'NoneType'")


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ("", "Task 3 of lesson 0 has no test; mark its tests with @pytest.mark.task(3)."),
        ("@pytest.mark.task(4)", "tests/l0/test_seats.py marks a test of task 4, and lesson 0 has no such task."),
    ],
)
def test_a_mark_that_is_missing_or_wrong_is_told(toy, mark, words):
    toy.edit("tests/l0/test_seats.py", "@pytest.mark.task(3)", mark)
    toy.write(1, 2, 3)
    said = toy.run("check", "0")
    assert said.code == 2 and words in said.err
