"""Course machinery. `check` finds what is wrong with a student's file and says it clearly.

Protects students from a red check that leaves them guessing, and from a green one that they have not earned.
"""

import json
import shutil

from lessons._course.headline import happened
from lessons._course.output import value as shortened_value
from lessons._course.progress import Progress
from lessons._course.report import Failure, TestResult
from lessons._course.result import Result
from tests.course.toy import check, states, words


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


def test_a_run_of_everything_says_why_the_tokens_were_not_compared(toy):
    toy.write()
    assert check(toy, everything=True).report.smoke.text == "tasks 1, 2, 3 are not written"


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


def test_an_error_in_the_students_code_is_shown_at_its_line(toy):
    toy.write_wrong("        return taken", "        return taken[9]")
    verdict = check(toy)
    assert verdict.advice.where.startswith("work/l0/seats.py:") and "in take:  return taken[9]" in verdict.advice.where
    assert "IndexError: list index out of range" in words(verdict)


def test_objects_are_shown_by_their_class_and_bytes_end_with_a_whole_escape():
    shown = "<Node> has b'a" + "\\x00" * 5 + "…'"
    assert shortened_value(f"<a.b.Node object at 0x7f> has {b'a' + bytes(40)!r}") == shown


def test_a_figure_without_a_meaning_is_not_printed():
    failure = Failure("AssertionError", "", words=[f"off by {2.0**100:.1f} steps of the scale"])
    said = happened(TestResult("t", "failed", failure=failure))
    assert said == "is not right yet: off by far more than a million steps of the scale"
    kept = "key 12345678901234567890, 3.25, 1e+30, 123456789.5"
    assert shortened_value(kept) == kept


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


def test_output_of_the_students_code_is_shown(toy):
    toy.write_wrong("        return taken", "        print('taken:', taken)\n        return [7]")
    assert "Your code printed:\n  taken: [0, 1]" in words(check(toy))


def test_a_syntax_error_is_shown_and_nothing_is_run(toy):
    toy.write_wrong("        while seats:", "        while seats")
    verdict = check(toy)
    assert verdict.advice.headline == "Syntax error: nothing could be run."
    assert "expected ':'" in words(verdict) and "while seats\n" in words(verdict) and "^" in words(verdict)
    assert verdict.advice.where.startswith("work/l0/seats.py:") and not verdict.report.results


def test_a_syntax_error_keeps_the_progress(toy):
    toy.write(1, 2)
    check(toy)
    toy.edit("work/l0/seats.py", "FIRST = 0", "FIRST = = 0")
    check(toy)
    assert Progress(toy.places.work).entry(toy.lesson).tasks_done == [1, 2]


def test_an_error_at_import_is_shown_at_its_line(toy):
    toy.write_wrong("FIRST = 0", "FIRST = 1 / 0")
    verdict = check(toy)
    assert verdict.advice.headline == "Your file cannot be imported."
    assert verdict.advice.where.startswith("work/l0/seats.py:5") and "ZeroDivisionError" in words(verdict)


def test_an_error_that_breaks_the_test_setup_is_shown_at_its_line(toy):
    (toy.places.root / "tests/l0/conftest.py").write_text("import mini_engine.kv.seats\n", encoding="utf-8")
    toy.write_wrong("FIRST = 0", "FIRST = 1 / 0")
    verdict = check(toy)
    assert verdict.advice.headline == "The check could not run."
    assert verdict.advice.where == "work/l0/seats.py:5" and "ZeroDivisionError" in words(verdict)


def test_a_deleted_function_is_named(toy):
    toy.write_wrong("def double(", "def doubled(")
    verdict = check(toy)
    assert verdict.advice.headline == "double is missing from your file."
    assert "double (task 1) is no longer in your file" in words(verdict) and "lessons diff 0" in words(verdict)


def test_a_changed_signature_is_shown_beside_the_expected_one(toy):
    toy.write_wrong("        n: int,  # how many", "        n: int,\n        m: int,")
    verdict = check(toy)
    assert verdict.advice.headline == "The signature of Seats.take has changed."
    assert "Your Seats.take is (self, n, m)" in words(verdict) and "expect (self, n)" in words(verdict)


def test_a_harmless_signature_change_is_only_a_note(toy):
    toy.write_wrong("        n: int,  # how many", "        n: int,\n        m: int = 1,")
    verdict = check(toy)
    assert verdict.passed
    assert [note.headline for note in verdict.notes] == ["The signature of Seats.take has changed."]


def test_different_tokens_are_shown_with_position_and_cause(toy):
    toy.write_wrong("return taken", "return taken[:3] + taken[3:][::-1]")
    verdict = check(toy)
    assert verdict.report.smoke.state == "differs" and not verdict.passed
    assert "First difference at new token 3: Hugging Face chose 3, your code 4;" in words(verdict)
    assert "the two highest logits there are 0.5000 apart." in words(verdict)
    assert "layer 7, attention" in words(verdict)


def test_a_crashing_smoke_script_is_shown_with_its_error(toy):
    toy.edit("scripts/l0_smoke.py", "match = ", "1 / 0\nmatch = ")
    toy.write(1, 2, 3)
    verdict = check(toy)
    assert verdict.report.smoke.state == "failed" and not verdict.passed
    assert "ZeroDivisionError" in words(verdict)


def test_an_interpreter_that_exits_during_a_test_is_reported(toy):
    toy.write_wrong("        return taken", "        import os\n        os._exit(7)")
    verdict = check(toy)
    assert states(verdict) == ["done", "failing", "NOT CHECKED"]
    assert "Python itself stopped in this test (exit code 7)" in verdict.advice.headline


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


def test_a_student_who_adopted_the_change_sees_no_note(toy):
    toy.run("start", "0")
    for name in ("mini_engine/kv/seats.py", "work/l0/seats.py"):
        toy.edit(name, "def give_back(self, seats: list[int])", "def give_back(self, seats, row=0)")
    assert check(toy).notes == []


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
    assert found["advice"]["headline"] == "Task 1 is done: 2 tests passed."
    assert found["tests"]["total"] == 2 and found["smoke"]["state"] == "NOT CHECKED"
