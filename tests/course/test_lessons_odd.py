"""Course machinery. `check` copes with odd files, and says what is odd about them.

Protects students whose file prints, loops, crashes or leaves Python: a check still ends and says what happened.
"""

import sys

import pytest

from lessons._course.progress import Progress
from lessons._course.runner import Spawned
from tests.course.toy import Toy, check, words

TOP = "FIRST = 0"


def at_top(toy: Toy, line: str) -> None:
    """Write a finished file with one more line at its top."""
    toy.write_wrong(TOP, f"FIRST = 0\n{line}\n")


@pytest.mark.parametrize("end", ["", "\\n"])
def test_a_stray_print_does_not_hide_the_smoke_scripts_result(toy, end):
    at_top(toy, f"print('debug {{', end='{end}')")
    verdict = check(toy)
    assert verdict.passed and verdict.report.smoke.state == "equal"
    assert [note.headline for note in verdict.notes] == ["Your code prints while it runs. That does no harm here."]
    assert verdict.notes[0].lines == ["debug {"]


def test_megabytes_of_output_are_cut(toy):
    toy.write_wrong("        return taken", "        print('x' * 3_000_000)\n        return [7]")
    said = words(check(toy))
    assert "Your code printed:" in said and len(said) < 2500, len(said)


def test_leaving_python_at_the_top_is_named(toy):
    at_top(toy, "import sys; sys.exit(3)")
    verdict = check(toy)
    assert verdict.advice.headline == "Your file cannot be imported."
    assert verdict.advice.where.startswith("work/l0/seats.py:6") and "Remove the call of `exit()`" in words(verdict)


def test_leaving_python_without_a_word_is_named(toy):
    at_top(toy, "import os; os._exit(0)")
    verdict = check(toy)
    assert not verdict.passed and not Progress(toy.places.work).entry(toy.lesson).passed
    assert "Python itself stopped before the first test, by os._exit()" in words(verdict)


def test_leaving_python_in_the_smoke_script_is_named(toy):
    toy.write_wrong("        return taken", "        import os\n        if n == 5: os._exit(0)\n        return taken")
    verdict = check(toy)
    assert not verdict.passed and "ended without a result (exit code 0)" in words(verdict)


def test_leaving_python_behind_the_smoke_scripts_result_is_no_success(toy):
    crash = "        import atexit, os\n        if n == 5: atexit.register(os._exit, 3)\n        return taken"
    toy.write_wrong("        return taken", crash)
    verdict = check(toy, launch=Spawned)
    assert not verdict.passed and "ended without a result (exit code 3)" in words(verdict)


def test_waiting_for_input_is_named(toy):
    toy.write_wrong("        return taken", "        return [int(input('how many?'))]")
    verdict = check(toy)
    assert "`input()` waits for typing" in words(verdict) and verdict.advice.result.status == "error"


def test_endless_recursion_is_named(toy):
    toy.write_wrong("double(x: int) -> int: return 2 * x", "double(x: int) -> int: return double(x)")
    verdict = check(toy)
    assert verdict.advice.headline.startswith("Task 1 (double) raises RecursionError")
    assert "A function calls itself forever" in words(verdict) and "in double" in verdict.advice.where


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
    at_top(toy, line)
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


def test_tabs_among_spaces_are_a_syntax_error(toy):
    toy.write_wrong("        return taken", "\treturn taken")
    verdict = check(toy)
    assert verdict.advice.headline == "Syntax error: nothing could be run." and "tabs" in words(verdict)


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


def test_long_values_are_shown_whole_but_long_bytes_are_not(toy):
    toy.edit("tests/l0/test_seats.py", "take(2) == [0, 1],", "take(2) == list(range(40)),")
    toy.write_wrong("        return taken", "        return [b'\\x00' * 500]")
    said = words(check(toy))
    assert str(list(range(40))) in said and "\\x00" * 20 not in said


@pytest.mark.skipif(sys.platform == "win32", reason="a signal ends the process")
def test_a_crash_in_native_code_is_named(toy):
    toy.write_wrong("        return taken", "        import os, signal\n        os.kill(os.getpid(), signal.SIGSEGV)")
    verdict = check(toy)
    assert "Python itself stopped in this test (killed by SIGSEGV)" in verdict.advice.headline
