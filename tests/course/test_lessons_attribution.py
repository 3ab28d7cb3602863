"""Course machinery. Every red names a task and says what was observed; nothing is guessed from a test's name.

Protects students from being sent to a task that is right, or to the wrong pitfall.
"""

import importlib
import json

from lessons._course.catalog import Bug
from lessons._course.messages import remarks, shows
from lessons._course.output import value
from lessons._course.places import CHILD
from lessons._course.progress import Progress
from lessons._course.report import Failure, TestResult
from lessons._course.result import calls_of, input_of
from tests.course.toy import Toy, check, words

MACHINE = """from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mini_engine.kv.seats import Seats


class World:
    def __init__(self):
        self.seats, self.held = Seats(4), []

    def board(self, n):
        self.held += self.seats.take(min(n, len(self.seats.free)))

    def leave(self):
        self.seats.give_back(self.held)
        self.held = []


class SeatMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World()

    @rule(n=st.integers(0, 4), note=st.binary(min_size=60))
    def arrive(self, n, note):
        self.world.board(n)

    @rule()
    def depart(self):
        self.world.leave()

    @invariant()
    def none_is_lost(self):
        assert len(self.world.seats.free) + len(self.world.held) == 4, "a seat was lost"


TestSeats = SeatMachine.TestCase
TestSeats.settings = settings(max_examples=30, stateful_step_count=6, derandomize=True)
"""


def add_test(toy: Toy, text: str) -> None:
    path = toy.places.root / "tests/l0/test_seats.py"
    path.write_text(path.read_text(encoding="utf-8") + "\n\n" + text, encoding="utf-8")


def test_a_machines_failure_is_a_short_list_of_calls_with_its_task(toy):
    (toy.places.root / "tests/l0/test_z_machine.py").write_text(MACHINE, encoding="utf-8")
    toy.write_wrong("        while seats:", "        while len(seats) > 2:")
    verdict = check(toy)
    add = words(verdict)
    assert verdict.advice.headline in (
        "Task 3 (Seats.give_back) is not right yet: what is given back is free again",
        "Task 3 (Seats.give_back) is not right yet: a seat was lost",
    )
    toy.edit("tests/l0/test_seats.py", "seats.give_back([3, 5])", "seats.give_back([3, 5, 7])")
    toy.edit("tests/l0/test_seats.py", "assert sorted(seats.free) == [3, 5]", "assert 7 in seats.free")
    verdict = check(toy)
    add = words(verdict)
    assert verdict.advice.headline == "Task 3 (Seats.give_back) is not right yet: a seat was lost", add
    assert "state.depart()" in add and "\\x00" * 20 not in add and not verdict.advice.result.is_likely


def test_an_error_in_a_test_of_no_task_belongs_to_the_task_that_raised_it(toy):
    add_test(toy, "def test_ten():\n    assert double(10) == 20\n")
    toy.write_wrong("double(x: int) -> int: return 2 * x", "double(x):\n    return {1: 2, 5: 10}[x]")
    assert check(toy).advice.headline == "Task 1 (double) raises KeyError: 10"


def test_a_wrong_value_in_a_test_of_no_task_belongs_to_the_task_that_it_calls(toy):
    add_test(toy, "def test_ten():\n    ten = 10\n    assert double(ten) == 20\n")
    toy.write_wrong("double(x: int) -> int: return 2 * x", "double(x):\n    return 2 * x if x < 9 else 0")
    toy.done(1, 2)
    verdict = check(toy)
    assert verdict.advice.headline == "Task 1 (double) is not right yet: `double(ten)` is 0, expected: 20."
    assert verdict.advice.result.input == "  ten = 10\n> assert double(ten) == 20"


# A test of task 2 that needs task 3, and a mistake of task 3 that only this test sees.
AGAIN = """@pytest.mark.task(2)
def test_take_again():
    seats = Seats(2)
    seats.give_back(seats.take(2))
    assert seats.take(2) == [1, 0], "what was given back last goes last"
"""


FROM_THE_FRONT = (
    "seats = seats[:-1] if self.free.append(seats[-1]) is None else seats",
    "seats = seats[1:] if self.free.append(seats[0]) is None else seats",
)


def test_a_task_whose_own_tests_do_not_see_its_mistake_is_found_by_exchanging_its_code(toy):
    add_test(toy, AGAIN)
    toy.write_wrong(*FROM_THE_FRONT)
    toy.done(1, 3)
    verdict = check(toy)
    assert verdict.advice.headline == (
        "Task 3 (Seats.give_back) is not right yet: what was given back last goes last"
    ), "the test is task 2's, whose code is right"
    said = words(verdict)
    assert "With the reference's Seats.give_back in place of yours, this test passes." in said
    assert "--task" not in said, "its own tests pass"
    assert "python -m lessons hint 0 3" in said
    assert "was done before" not in said and not verdict.advice.result.is_likely
    assert verdict.advice.result.task == 3


def test_a_tests_own_task_is_exchanged_first(toy):
    add_test(toy, AGAIN)
    toy.write_wrong(
        "taken, self.free = self.free[:n], self.free[n:]", "taken, self.free = sorted(self.free[:n]), self.free[n:]"
    )
    toy.edit("tests/l0/test_seats.py", "assert Seats(4).take(2) == [0, 1]", "assert len(Seats(4).take(2)) == 2")
    said = words(check(toy))
    assert said.startswith("Task 2 (Seats.take) is not right yet") and "in place of yours" not in said


def test_if_no_exchange_helps_a_test_belongs_to_its_own_task(toy):
    add_test(toy, AGAIN)
    toy.edit("tests/l0/test_seats.py", "seats.take(2) == [1, 0]", "seats.take(2) == [7]")
    toy.write(1, 2, 3)
    verdict = check(toy)
    assert verdict.advice.headline.startswith("Task 2 (Seats.take)") and verdict.advice.failure.cause is None


def test_an_experiment_leaves_no_trace_in_the_report(toy):
    add_test(toy, AGAIN)
    toy.write_wrong(*FROM_THE_FRONT)
    events = []
    report = check(toy, everything=True, watcher=events.append).report
    assert [result.test.partition("::")[2] for result in report.results if result.outcome == "failed"] == [
        "test_take_again"
    ]
    assert report.count("passed") == len(report.results) - 2, "one failed, one is skipped"
    assert sum(event["event"] == "exception" for event in events) == 1


def test_decorated_and_imported_functions_are_exchanged_and_come_back(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(CHILD))
    swaps = importlib.import_module("course_swaps")
    source = """import contextlib, functools
class Pool:
    @property
    def size(self): return {0}
    @staticmethod
    def half(n: int = 4): return n // {1}
    @functools.cache
    def area(self): return {0}
@contextlib.contextmanager
def lent(): yield {0}
"""
    for name, numbers in (("mine", (1, 1)), ("theirs", (2, 2))):
        (tmp_path / f"{name}.py").write_text(source.format(*numbers), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("mine")
    half, lent = mine.Pool.half, mine.lent
    for symbol, get in (
        ("Pool.size", lambda: mine.Pool().size),
        ("Pool.half", lambda: half() - 2 if half() == 2 else 1),
        ("lent", lambda: lent().__enter__()),
    ):
        before = get()
        with swaps.Swap(1, symbol, "mine", str(tmp_path / "theirs.py")).done() as is_done:
            assert is_done and get() != before, symbol
        assert get() == before, symbol
    for symbol in ("Pool.gone", "nothing"):
        with swaps.Swap(1, symbol, "mine", str(tmp_path / "theirs.py")).done() as is_done:
            assert not is_done


def test_an_earlier_task_that_a_change_broke_is_named(toy):
    toy.write_wrong("double(x: int) -> int: return 2 * x", "double(x): return 3 * x")
    toy.done(1, 2)
    verdict = check(toy)
    assert verdict.advice.headline == "Task 1 (double) is not right yet: double means twice as much"
    assert "Task 1 was done before: a later change broke it." in words(verdict)
    assert Progress(toy.places.work).entry(toy.lesson).tasks_done == [2, 3], "task 3 passed, task 1 does not"


def test_the_next_task_comes_first_and_the_run_ends_at_the_first_failure(toy):
    toy.write_wrong("            seats = seats[:-1]", "            seats = seats[:-2]")
    toy.done(1, 2)
    verdict = check(toy)
    ran = [result.test for result in verdict.report.results if result.outcome != "not run"]
    assert ran == ["tests/l0/test_seats.py::test_give_back_makes_free"] and verdict.advice.result.task == 3
    assert [report.state for report in verdict.report.tasks] == ["done", "done", "failing"]
    assert "python -m lessons check 0 --task 3" in words(verdict) and "python -m lessons watch 0" in words(verdict)


def test_the_same_result_is_in_the_terminal_and_in_json(toy):
    toy.write_wrong("return taken", "return taken[::-1]")
    result = json.loads(toy.run("check", "0", "--json").out)["result"]
    said = toy.run("check", "0").out
    assert (result["task"], result["status"]) == (2, "failing")
    assert (result["got"], result["expected"]) == ("[1, 0]", "[0, 1]")
    assert f"Your code: {result['got']}\n  Expected:  {result['expected']}" in said
    assert "It looks like this pitfall" in result["hint"] and result["hint"] in said
    assert "> assert Seats(4).take(2)" in result["input"]
    assert all(line in said for line in result["input"].splitlines())
    assert len(said.splitlines()) <= 20


def test_a_pitfall_is_chosen_by_what_was_observed_not_by_a_tests_name():
    tests = ("tests/l0/test_seats.py::test_lowest_free_seats",)
    bug = Bug("The last seats go first", "m", "f", "r", tests, "lowest.free.seats")
    assert not shows(bug, TestResult(tests[0], "failed", failure=Failure("IndexError", "list index out of range")))
    assert shows(bug, TestResult(tests[0], "failed", failure=Failure("AssertionError", "the lowest free seats go")))


def test_an_exception_that_does_not_come_points_only_to_its_own_tests_pitfall():
    bug = Bug("p", "m", "f", "r", ("tests/a.py::test_a",), "DID NOT RAISE")
    failure = Failure("Failed", "DID NOT RAISE ValueError", must_raise="ValueError")
    assert shows(bug, TestResult("tests/a.py::test_a[1]", "failed", failure=failure))
    assert not shows(bug, TestResult("tests/a.py::test_other", "failed", failure=failure))


def test_hypothesis_notes_become_calls_or_an_example():
    notes = (
        "Failing test case: <state machine>\nstate = M()\nstate.ok()\na = state.take(n=1)\nstate.ok()\nstate.teardown()"
    )
    assert calls_of(Failure("AssertionError", "", notes=notes)) == ["a = state.take(n=1)"]
    notes = "Failing test case: test_g(\n    n=5,\n    xs=[],  # or any other generated value\n)"
    assert input_of(Failure("AssertionError", "", notes=notes)) == ["with n=5, xs=[]"]


def test_a_tests_own_notes_are_told_and_hypothesis_are_not():
    failure = Failure(
        "IndexError", "out of range", notes="seat 9 is not there\nFailing test case: test_g(\n    n=5,\n)"
    )
    assert remarks(failure) == ["seat 9 is not there"]


def test_only_bytes_are_shortened_not_names_and_apostrophes():
    prose = "b's chunk is not the last one of its prompt, so the second token is c's"
    assert value(prose) == prose
    names = "{'a': 1, 'b': [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], 'c': 3}"
    assert value(names) == names
    assert value(f"is {b'x' * 40!r} so") == f"is b'{'x' * 24}…' so"
