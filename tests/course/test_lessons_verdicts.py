"""Course machinery. A verdict says what a failed test compared, and which side is the student's.

Without these, a student would read pytest's text, or see their own value called the expected one. One run of pytest
under `check` fails in every way that a lesson's tests can fail; what it reports is compared with what a reader needs.
"""

import ast
import gc
import importlib.util
import types
from pathlib import Path

import pytest

from lessons._course.catalog import Target
from lessons._course.checker import Check
from lessons._course.headline import happened
from lessons._course.messages import general_hints, remarks
from lessons._course.output import both
from lessons._course.places import CHILD
from lessons._course.report import TestResult
from lessons._course.warm import warm_launch
from tests.course.toy import Toy

ROOT = Path(__file__).parents[2]
ABOVE = """import pytest
import torch
from hypothesis import given, strategies

from mini_engine.kv.seats import Seats


class Seat:
    def __repr__(self):
        return "<Seat 3>"


def take(n):
    return [1, 0]


def is_pair(found):
    assert (
        len(found) == 2
    )


seats, one, most, big = Seats(3), 1, 3, torch.arange(32.0).view(4, 8)
"""
# body of a test -> what a reader sees of it: (headline, sides, remarks), or a headline without remarks
CASES = {
    "assert take(2) == [0, 1]": ("`take(2)` is [1, 0], expected: [0, 1].", ("[1, 0]", "[0, 1]"), []),
    "got = take(2)\nassert got == [0]": ("`take(2)` is [1, 0], expected: [0].", ("[1, 0]", "[0]"), []),
    "got, why = take(2), 'b'\nassert got == [0], why": ("b", ("[1, 0]", "[0]"), []),
    "assert seats.count == 5, 'why\\nmore'": ("why", ("3", "5"), ["  more"]),
    "assert Seat() == 4": ("`Seat()` is <Seat 3>, expected: 4.", ("<Seat 3>", "4"), []),
    "assert seats.count < 0": ("`seats.count` is 3, expected: < 0.", ("3", "< 0"), []),
    "assert most >= 9": ("`most` is 3, expected: >= 9.", ("3", ">= 9"), []),
    "assert 'a' in str(seats.count)": "`str(seats.count)` is '3', expected: something with 'a'.",
    "assert '3' not in str(3)": "`str(3)` is '3', expected: something without '3'.",
    "assert 5 < most < 9": ("this does not hold: `5 < most < 9`.", ("", ""), ["Not true: 5 < 3"]),
    "assert most == len(take(2)) == 3": ("`most` is 3, expected: 2.", ("3", "2"), []),
    "assert dict(a=1) is dict(a=1)": (None, ("{'a': 1}", "the same object, not another one that is equal"), []),
    "assert one == 1 and most == 2, 'b'": ("b", ("3", "2"), []),
    "assert not seats.free": ("this does not hold: `not seats.free`.", ("", ""), []),
    "assert False": ("a test expects something else at test_cases.py:", ("", ""), []),
    "raise AssertionError('no seat')": ("no seat", ("", ""), []),
    "pytest.fail('no seat')": ("no seat", ("", ""), []),
    "assert [1] * 50 == [0] * 50": ("`[1] * 50` is not what the test expects.", None, ["At index 0: 1, expected 0"]),
    "assert list(range(40)) == list(range(39))": (None, None, ["Its length is 40, expected 39"]),
    "assert bytes(60) + b'mine' == bytes(60) + b'yours'": (None, ("mine", "yours"), []),
    "is_pair(take(2) * 2)": ("`len(found)` is 4, expected: 2.", ("4", "2"), []),
    "assert take(0) is None or take(1) is None": (None, ("[1, 0]", "None"), []),
    # tensors
    "assert torch.equal(big.flip(0), big), 'b'": (
        "b",
        ("24.0 at [0, 0]", "0.0 at [0, 0]"),
        ["32 of 32 values differ (float32 of shape (4, 8))."],
    ),
    "assert torch.equal(torch.zeros(2, 3), torch.zeros(3, 2))": (
        "`torch.zeros(2, 3)` is float32 of shape (2, 3), expected: float32 of shape (3, 2)."
    ),
    "assert torch.equal(torch.zeros(2), torch.zeros(3).int()), 'b'": ("b", ("float32 of shape (2,)", "int32"), []),
    "assert torch.equal(torch.tensor([1, 2]), torch.tensor([1, 3]))": (
        None,
        ("tensor([1, 2])", "tensor([1, 3])"),
        ["1 of 2 values differ (int64 of shape (2,))."],
    ),
    "other = big + 0.01\nother[1, 1] = 12\nassert torch.allclose(big, other, atol=0.1)": (
        None,
        ("9.0 at [1, 1]", "12.0 at [1, 1]"),
        ["1 of 32 values differ (float32 of shape (4, 8))."],
    ),
    "torch.testing.assert_close(big, big + 1, msg=lambda text: f'b: {text}')": ("b", ("0.0 at [0, 0]", "1.0"), None),
    "torch.testing.assert_close(big, big + 1)": ("`big` is 0.0 at [0, 0], expected: 1.0 at [0, 0].", None, None),
    "assert all(torch.equal(x, big) for x in (big, big + 1)), 'b'": ("b", ("1.0 at [0, 0]", "0.0 at [0, 0]"), None),
    "assert not torch.equal(big, -big)\nassert seats.count is None": (None, ("3", "None"), []),
    "assert not torch.equal(big, -big)\nassert seats.free == 0 or not one": (None, ("[0, 1, 2]", "0"), []),
    "assert not torch.equal(big, -big)\nassert not one": ("this does not hold: `not one`.", ("", ""), []),
    # what should have raised
    "with pytest.raises(ValueError):\n    Seats(3).take(1)": (
        "`Seats.take(1)` must raise ValueError, and raises nothing.",
        ("no exception", "ValueError"),
        [],
    ),
    "with pytest.raises((KeyError, ValueError)) as caught:\n    one = take(1)\n    seats.free[one[1]]": (
        "`seats.free[one[1]]` must raise KeyError or ValueError, and raises nothing."
    ),
    "with pytest.raises(ValueError):\n    for n in (0, 1):\n        take(n)": (
        "`Seats.take(n)` must raise ValueError, and raises nothing."
    ),
    "with pytest.raises(ValueError):\n    seats.size = 0": (
        "a call in the test must raise ValueError, and raises nothing."
    ),
    "with pytest.raises(ValueError, match='need 9'):\n    Seats(2).take(3)": (
        "the error must say something that matches 'need 9', and says 'need 3 seats, 2 free of 2'."
    ),
    "with pytest.raises(KeyError):\n    [][1]": (
        "raises IndexError: list index out of range where KeyError is expected.",
        ("", ""),
        [],
    ),
    "try:\n    with pytest.raises(KeyError):\n        take(1)\nexcept BaseException as error:\n"
    "    error.add_note('say why')\n    raise": ("say why", ("no exception", "KeyError"), []),
    "with pytest.raises(ValueError):\n    Seats(0).take(1)\nassert one == 2": "`one` is 1, expected: 2.",
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, TestResult]:
    """Run every case once, in one pytest under `check`; return the results by the test's body."""
    toy = Toy(tmp_path_factory.mktemp("toy"))
    tests = [f"def test_{i}():\n    " + body.replace("\n", "\n    ") for i, body in enumerate(CASES)]
    (toy.places.root / "tests/l0/test_cases.py").write_text("\n\n\n".join([ABOVE, *tests]) + "\n", encoding="utf-8")
    toy.write(1, 2, 3)
    report = Check(toy.lesson, toy.places, launch=warm_launch(), only=["tests/l0/test_cases.py"]).run()
    assert len(report.results) == len(CASES), report.trouble
    return dict(zip(CASES, report.results, strict=True))


@pytest.mark.parametrize("body", CASES)
def test_a_failure_names_its_sides(failures, body):
    case = CASES[body]
    headline, sides, lines = (case, None, []) if isinstance(case, str) else case
    result, targets = failures[body], [Target("seats.py", "Seats.take")]
    said = happened(result, targets).removeprefix("is not right yet: ")
    assert said.startswith(headline or ""), "the headline"
    found = both(result.failure.got, result.failure.expected)
    for wanted, shown in zip(sides or found, found, strict=True):
        assert wanted in shown and bool(wanted) == bool(shown), "the sides"
    assert lines is None or remarks(result.failure) == lines, "further lines"


@pytest.mark.parametrize(
    ("body", "is_returned"),
    [
        ("assert take(2) == [0, 1]", True),
        ("got = take(2)\nassert got == [0]", True),
        ("assert seats.count == 5, 'why\\nmore'", False),
        ("assert one == 1 and most == 2, 'b'", False),
    ],
)
def test_only_a_returned_none_asks_for_a_return(failures, body, is_returned):
    failure = failures[body].failure
    failure.got, before = "None", failure.got
    assert bool(general_hints(failure)) == is_returned
    failure.got = before


def compared(path: Path) -> list[tuple[int, ast.Compare]]:
    """Return the comparisons that the assertions of a file consist of, with their lines."""
    asserts = [node.test for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Assert)]
    found = []
    while asserts:
        test = asserts.pop()
        if isinstance(test, ast.BoolOp):
            asserts += test.values
        elif isinstance(test, ast.UnaryOp) and isinstance(test.operand, ast.Compare):
            found.append((test.lineno, ast.Compare(ast.Constant("not"), [ast.Eq()], [test.operand])))
        elif isinstance(test, ast.Compare):
            found.append((test.lineno, test))
    return found


def is_constant(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def test_lessons_tests_have_the_codes_value_on_the_left():
    """The rule that verdicts rely on: `got == expected`, `got < most`, `expected in got`; a bound may begin a chain."""
    wrong = []
    for path in [*ROOT.glob("tests/l[0-9]*/*.py"), ROOT / "tests/support.py"]:
        for line, test in compared(path):
            is_in = isinstance(test.ops[0], ast.In | ast.NotIn)
            known, other = (test.comparators[0], test.left) if is_in else (test.left, test.comparators[0])
            if len(test.ops) == 1 and is_constant(known) and not is_constant(other):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {ast.unparse(test)}")
    assert not wrong, "write `got == expected`, or `got == OneOf(…)` for `got in (…)`:\n" + "\n".join(wrong)


class ParsesAtTheEnd:
    """Garbage whose finalizer parses, as a warning's traceback does; a cycle, so that only the collector finds it."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        ast.parse("x = 1")


def child(name: str) -> types.ModuleType:
    """Import a module of the processes under `check`."""
    spec = importlib.util.spec_from_file_location(name, CHILD / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_finalizer_that_parses_does_not_disturb_the_description_of_a_failure():
    parse, source = child("course_statement").parse, "\n".join(f"x{i} = [{i}, ({i}, {i})]" for i in range(300))
    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for _ in range(40):
            ParsesAtTheEnd()
            assert len(parse(source).body) == 300
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled(), "the collector is on again"
