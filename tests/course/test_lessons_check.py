"""Course machinery. `check` finds what is wrong with a student's file and says it clearly.

Protects students from a red check that leaves them guessing, and from a green one that they have not earned.
"""

import json
import shutil
import sys

import pytest

from lessons._course.progress import Progress
from lessons._course.result import Result
from lessons._course.runner import Spawned
from tests.course.toy import WARM, check, states, words

DOUBLE, RETURN = "double(x: int) -> int: return 2 * x", "        return taken"
WRONG = {  # what is wrong: a change of the finished file, how the advice begins, and what it says besides
    "an error": (RETURN, "        return taken[9]", "Task 2 (Seats.take) raises IndexError: list index out of range",
        "work/l0/seats.py:", "in take:  return taken[9]"),
    "output": (RETURN, "        print('taken:', taken)\n        return [7]", "Task 2", "printed:\n  taken: [0, 1]"),
    "a syntax error": ("        while seats:", "        while seats", "Syntax error: nothing could be run.\nwork/l0",
        "expected ':'", "while seats\n", "^"),
    "tabs": (RETURN, "\treturn taken", "Syntax error: nothing could be run.", "tabs"),
    "an error at import": ("FIRST = 0", "FIRST = 1 / 0", "Your file cannot be imported.\nwork/l0/seats.py:5",
        "ZeroDivisionError"),
    "a deleted function": ("def double(", "def doubled(", "double is missing from your file.",
        "double (task 1) is no longer in your file", "lessons diff 0"),
    "another signature": ("n: int,  # how many", "n: int, m: int,", "The signature of Seats.take has changed.",
        "Your Seats.take is (self, n, m)", "expect (self, n)"),
    "different tokens": ("return taken", "return taken[:3] + taken[3:][::-1]", "",
        "First difference at new token 3: Hugging Face chose 3, your code 4;",
        "the two highest logits there are 0.5000 apart.", "layer 7, attention"),
    "Python is left in a test": (RETURN, "        import os\n        os._exit(7)", "Task 2",
        "Python itself stopped in this test (exit code 7)"),
    "Python is left at the top": ("FIRST = 0", "import sys; sys.exit(3)",
        "Your file cannot be imported.\nwork/l0/seats.py:5", "Remove the call of `exit()`"),
    "Python is left at the top without a word": ("FIRST = 0", "import os; os._exit(0)", "",
        "Python itself stopped before the first test, by os._exit()"),
    "Python is left in the smoke script": (RETURN, f"        import os\n        if n == 5: os._exit(0)\n{RETURN}", "",
        "ended without a result (exit code 0)"),
    "Python is left behind the smoke script's result": (RETURN,
        f"        import atexit, os\n        if n == 5: atexit.register(os._exit, 3)\n{RETURN}", "",
        "ended without a result (exit code 3)"),
    "a crash in native code": (RETURN, "        import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "Task 2",
        "Python itself stopped in this test (killed by SIGSEGV)"),
    "input": (RETURN, "        return [int(input('how many?'))]", "Task 2", "`input()` waits for typing"),
    "endless recursion": (DOUBLE, "double(x: int) -> int: return double(x)", "Task 1 (double) raises RecursionError",
        "A function calls itself forever", "in double"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what, toy):
    if "SIGSEGV" in WRONG[what][1] and sys.platform == "win32":
        pytest.skip("a signal ends the process")
    old, new, begins, *says = WRONG[what]
    toy.write_wrong(old, new)
    verdict = check(toy, launch=Spawned if "behind" in what else WARM)
    said = words(verdict)
    assert not verdict.passed and not Progress(toy.places.work).entry(toy.lesson).passed
    assert said.startswith(begins) and not [text for text in says if text not in said], said


def no_process(command):
    raise AssertionError("what the source shows needs no process")


def test_a_fresh_starter_is_red_and_names_its_first_task(toy):
    toy.write()
    verdict = check(toy, launch=no_process)
    assert not verdict.passed and states(verdict) == ["not written"] * 3
    assert verdict.advice.headline == "Task 1 is not written yet: Double a number."
    assert verdict.advice.where.startswith("work/l0/seats.py:")
    assert "Red is expected here" in words(verdict) and "python -m lessons hint 0 1" in words(verdict)
    assert verdict.advice.result == Result("not_written", 1, hint=verdict.advice.lines[0])


def test_progress_grows_task_by_task_until_everything_is_green(toy):
    written, seen = [], []
    for number in (2, 1, 3):
        written.append(number)
        toy.write(*written)
        verdict = check(toy)
        seen.append(Progress(toy.places.work).entry(toy.lesson).tasks_done)
        assert verdict.passed == (len(written) == 3)
    assert seen == [[2], [1, 2], [1, 2, 3]]
    assert verdict.report.smoke.state == "equal"


def test_a_skipped_test_is_reported_as_not_checked_never_as_passed(toy):
    toy.edit("tests/l0/test_seats.py", "def test_give_back", '@pytest.mark.skip(reason="no GPU")\ndef test_give_back')
    toy.write(1, 2, 3)
    verdict = check(toy)
    assert states(verdict) == ["done", "done", "NOT CHECKED"]
    assert verdict.report.not_checked == ["1 test: no GPU", "1 test: needs a unicorn"]
    entry = Progress(toy.places.work).entry(toy.lesson)
    assert entry.passed and entry.tasks_done == [1, 2] and len(entry.not_checked) == 2


def test_an_unwritten_task_is_open_even_if_its_tests_are_skipped(toy):
    toy.edit("tests/l0/test_seats.py", "def test_give_back", '@pytest.mark.skip(reason="no GPU")\ndef test_give_back')
    toy.write(1, 2)
    verdict = check(toy)
    assert states(verdict)[2] == "not written" and not verdict.passed


def test_a_module_that_skips_itself_leaves_its_tasks_not_checked(toy):
    toy.edit(
        "tests/l0/test_seats.py",
        "import pytest\n",
        'import pytest\n\npytest.skip("no compiler", allow_module_level=True)\n',
    )
    toy.write(1, 2, 3)
    verdict = check(toy)
    assert states(verdict) == ["NOT CHECKED"] * 3
    assert not verdict.passed, "a lesson of which nothing was checked must not pass"


def test_the_first_failing_test_is_shown_with_its_own_message(toy):
    toy.write_wrong("self.free[:n], self.free[n:]", "self.free[-n:], self.free[:-n]")
    verdict = check(toy)
    assert states(verdict) == ["done", "failing", "NOT CHECKED"]
    assert verdict.advice.headline == "Task 2 (Seats.take) is not right yet: the lowest free seats go first"
    assert "Your code: [2, 3]\nExpected:  [0, 1]" in words(verdict), "the output must say which side is the student's"
    assert "pitfall of lessons/l0_toy/README.md: The last seats go first" in words(verdict)


def test_of_a_hypothesis_test_the_lines_are_shown_too(toy):
    toy.edit(
        "tests/l0/test_seats.py",
        "def test_of_no_task",
        """@given(strategies.just(2))
def test_taken_by_chance(count):
    taken = Seats(3).take(count)
    assert taken == [0, 1]


def test_of_no_task""",
    )
    toy.edit("tests/l0/test_seats.py", "import pytest\n", "import pytest\nfrom hypothesis import given, strategies\n")
    toy.write_wrong("self.free[:n], self.free[n:]", "self.free[-n:], self.free[:-n]")
    bad = next(one for one in check(toy, everything=True).report.results if "by_chance" in one.test)
    assert bad.failure.did == ["  taken = Seats(3).take(count)", "> assert taken == [0, 1]"]


def test_a_syntax_error_keeps_the_progress(toy):
    toy.write(1, 2)
    check(toy)
    toy.edit("work/l0/seats.py", "FIRST = 0", "FIRST = = 0")
    check(toy)
    assert Progress(toy.places.work).entry(toy.lesson).tasks_done == [1, 2]


def test_a_harmless_signature_change_is_only_a_note(toy):
    toy.write_wrong("        n: int,  # how many", "        n: int,\n        m: int = 1,")
    verdict = check(toy)
    assert verdict.passed
    assert [note.headline for note in verdict.notes] == ["The signature of Seats.take has changed."]


def test_an_error_that_breaks_the_test_setup_is_shown_at_its_line(toy):
    (toy.places.root / "tests/l0/conftest.py").write_text("import mini_engine.kv.seats\n", encoding="utf-8")
    toy.write_wrong("FIRST = 0", "FIRST = 1 / 0")
    said = words(check(toy))
    assert said.startswith("The check could not run.\nwork/l0/seats.py:5") and "ZeroDivisionError" in said


def test_a_crashing_smoke_script_is_shown_with_its_error(toy):
    toy.edit("scripts/l0_smoke.py", "match = ", "1 / 0\nmatch = ")
    toy.write(1, 2, 3)
    verdict = check(toy)
    assert verdict.report.smoke.state == "failed" and not verdict.passed
    assert "ZeroDivisionError" in words(verdict)


def test_tests_that_never_import_the_students_file_prove_nothing(toy):
    toy.write(1, 2, 3)
    toy.edit(
        "tests/l0/test_seats.py", "from mini_engine.kv.seats import Seats, double", "from copied import Seats, double"
    )
    shutil.copy(toy.places.root / "mini_engine/kv/seats.py", toy.places.root / "copied.py")
    verdict = check(toy)
    assert not verdict.passed and "never imported your version of mini_engine.kv.seats" in words(verdict)
    assert not Progress(toy.places.work).entry(toy.lesson).passed


def test_one_task_can_be_checked_alone(toy):
    toy.write(2)
    verdict = check(toy, task=2)
    assert [result.test.partition("::")[2] for result in verdict.report.results] == [
        "test_take_hands_out_the_lowest",
        "test_take_refuses_and_changes_nothing",
    ]
    assert states(verdict) == ["done"] and verdict.advice.headline == "Task 2 is done: 2 tests passed."
    entry = Progress(toy.places.work).entry(toy.lesson)
    assert entry.tasks_done == [2] and not entry.passed
    assert toy.run("check", "0", "--task", "2").code == 0 and toy.run("check", "0", "--task", "1").code == 1


def test_a_signature_that_the_reference_changed_is_not_blamed_on_the_student(toy):
    assert toy.run("start", "0").code == 0
    toy.edit("mini_engine/kv/seats.py", "def give_back(self, seats: list[int])", "def give_back(self, seats, row=0)")
    verdict = check(toy)
    note = verdict.notes[0]
    assert note.headline == "The reference has changed since you started."
    assert note.lines == ["Seats.give_back is now (self, seats, row=0)"]
    assert "python -m lessons start 0 --fresh" in note.commands[0]
    assert "signature" not in verdict.advice.headline


def test_a_change_of_the_reference_is_noted_unless_it_is_inside_a_task(toy):
    toy.run("start", "0")
    toy.edit("mini_engine/kv/seats.py", "return 2 * x", "return x + x")
    assert check(toy).notes == []
    toy.edit("mini_engine/kv/seats.py", "FIRST = 0", "FIRST = 0 + 0")
    assert [note.headline for note in check(toy).notes] == ["The reference has changed since you started."]


def test_a_program_can_read_the_verdict(toy):
    toy.write(1)
    done = toy.run("check", "0", "--json")
    found = json.loads(done.out)
    assert done.code == 1 and found["passed"] is False
    assert [task["state"] for task in found["tasks"]] == ["done", "not written", "not written"]
    assert found["advice"]["headline"] == "Task 1 is done: 2 tests passed." and found["result"]["status"] == "done"
    assert found["tests"]["total"] == 2 and found["smoke"]["state"] == "NOT CHECKED"
