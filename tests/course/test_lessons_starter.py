"""Course machinery. The starter is the reference without its tasks' bodies, and contains nothing of them.

Without it, a starter could give a solution away, or differ from the reference where the student changes nothing.
"""

import ast
import io
import tokenize
from collections import Counter

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.places import CourseError, Places
from lessons._course.starter import blank_symbols, find_function, fingerprint, make_starter, signatures
from lessons._course.student import starter_of, student_files
from tests.course.toy import SEATS

PLACES = Places.find()
CASES = [
    pytest.param(lesson, file, id=f"{lesson.id}-{file.path.name}")
    for lesson in read_lessons(PLACES)
    for file in student_files(lesson, PLACES)
]


def comments(text: str, first: int = 1, last: int = 10**9) -> Counter:
    """Return the comments on the lines `first` to `last`."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return Counter(t.string for t in tokens if t.type == tokenize.COMMENT and first <= t.start[0] <= last)


def without_bodies(text: str, symbols: list[str]) -> str:
    """Return the syntax tree, with only the docstring left in each of `symbols`."""
    tree = ast.parse(text)
    for symbol in symbols:
        node = find_function(tree, symbol)
        node.body = node.body[:1] if ast.get_docstring(node) is not None else []
    return ast.dump(tree)


def comments_in(text: str, symbol: str) -> Counter:
    """Return the comments between a signature's end and the next line indented no deeper than its `def`."""
    node, lines = find_function(ast.parse(text), symbol), text.splitlines()
    last = node.end_lineno
    while last < len(lines) and (not lines[last].strip() or lines[last].startswith(" " * (node.col_offset + 1))):
        last += 1
    return comments(text, node.body[0].lineno, last)


def assert_nothing_leaks(starter: str, reference: str, symbols: list[str]) -> None:
    """Check that the starter equals the reference except for the bodies, each of which is a NotImplementedError."""
    assert without_bodies(starter, symbols) == without_bodies(reference, symbols), "something beside the bodies changed"
    assert set(symbols) <= blank_symbols(starter), "a body is not taken out"
    secret = sum((comments_in(reference, symbol) for symbol in symbols), Counter())
    assert comments(starter) == comments(reference) - secret, "a comment of a body is left, or another one is lost"


def toy_starter(*symbols: str) -> str:
    return make_starter(SEATS, {symbol: f"Lesson 0, task {i}: x" for i, symbol in enumerate(symbols, 1)})


@pytest.mark.parametrize(("lesson", "file"), CASES)
def test_no_starter_contains_any_of_a_solution(lesson, file):
    symbols = list(lesson.tasks_in(file.module))
    assert_nothing_leaks(starter_of(lesson, file), file.reference_source, symbols)


@pytest.mark.parametrize(("lesson", "file"), CASES)
def test_each_body_names_its_lesson_and_task(lesson, file):
    text = starter_of(lesson, file)
    for task in lesson.tasks_in(file.module).values():
        assert f'raise NotImplementedError("Lesson {lesson.number}, task {task.number}: ' in text


@pytest.mark.parametrize(("lesson", "file"), CASES)
def test_with_every_task_kept_the_starter_equals_the_reference(lesson, file):
    assert starter_of(lesson, file, keep=[task.number for task in lesson.tasks]) == file.reference_source


def test_comments_in_and_after_a_body_are_removed_and_others_kept():
    starter = toy_starter("Seats.take")
    assert "secret: look" not in starter and "secret: after" not in starter
    assert "# no secret: between" in starter and "# how many" in starter
    assert_nothing_leaks(starter, SEATS, ["Seats.take"])


def test_a_body_on_the_line_of_its_def_is_removed():
    starter = toy_starter("double")
    assert 'def double(x: int) -> int:\n    raise NotImplementedError("Lesson 0, task 1: x")\n' in starter
    assert "2 * x" not in starter


def test_all_symbols_at_once_give_the_same_as_one_after_another():
    symbols = ["double", "Seats.take", "Seats.give_back"]
    assert_nothing_leaks(toy_starter(*symbols), SEATS, symbols)


@pytest.mark.parametrize(
    "function",
    [
        "async def f(a, *, b=1):\n    await b",
        "@decorated(lambda: {1: 2})\ndef f(a={1: 2}, b=lambda: 0) -> dict[str, int]:  # kept\n    return a",
        'def f():\n    """One: two."""; return 3',
        "def f():\n    # secret\n    return 3\n    # secret",
        "def f():\n    # secret, before the docstring\n    'é: döc'\n    return 'ü'  # secret",
        "def f(\n    x: dict = {'a': [1, 2]},  # kept: a\n):\n    yield x\n\n\n    # secret",
        "def f():\n    def g():  # secret\n        return 1\n\n    return g",
        'def f(): "only: a docstring"',
        "def f():\n\tif 1:\n\t\treturn 2",
    ],
)
@pytest.mark.parametrize("after", ["", "\n\n\n# after\nX = 1\n", "\n"])
def test_odd_functions(function, after):
    source = f"import os  # first\n\n\n{function}{after}"
    starter = make_starter(source, {"f": 'Lesson 1, task 2: say "x" \\ y'})
    namespace = {"decorated": lambda argument: lambda function: function}
    exec(compile(starter, "starter", "exec"), namespace)
    assert blank_symbols(starter) == {"f"}
    assert "secret" not in starter
    assert starter.count("# kept") == source.count("# kept") and starter.count("# after") == source.count("# after")
    assert ast.get_docstring(find_function(ast.parse(starter), "f")) == ast.get_docstring(
        find_function(ast.parse(source), "f")
    )


def test_a_starter_is_stable():
    starter = toy_starter("Seats.take")
    assert make_starter(starter, {"Seats.take": "Lesson 0, task 1: x"}) == starter


@pytest.mark.parametrize("symbol", ["Seats", "nothing", "Seats.nothing", "FIRST"])
def test_a_target_must_be_a_function(symbol):
    with pytest.raises(CourseError, match=symbol):
        toy_starter(symbol)


def test_a_body_with_code_before_the_raise_counts_as_written():
    assert blank_symbols('def f():\n    x = 1\n    raise NotImplementedError("Lesson 0, task 1: x")\n') == set()
    assert blank_symbols("def f():\n    raise NotImplementedError\n") == set()


def test_signatures_contain_what_a_caller_notices():
    found = signatures(SEATS)
    assert found["Seats.take"] == "(self, n)"
    assert found["Ticket"] == "@dataclass class() with seat, row=0"
    annotated = SEATS.replace("n: int,  # how many", "n: 'how many',")
    assert signatures(annotated) == found, "an annotation changes nothing for a caller"
    assert signatures(SEATS.replace("n: int,", "n: int = 1,")) != found


def test_fingerprints_ignore_comments_docstrings_and_layout():
    other = SEATS.replace("# secret: look before you take", "").replace("Take seats back, each once.", "Else.")
    assert fingerprint(other) == fingerprint(SEATS)
    assert fingerprint(SEATS.replace("2 * x", "3 * x")) != fingerprint(SEATS)
