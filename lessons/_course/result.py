"""Course machinery. The one result of a check, which the terminal, `--json` and the website show alike."""

import ast
import re
from dataclasses import asdict, dataclass
from typing import Any

from lessons._course.output import both, value
from lessons._course.report import Failure
from lessons._course.statements import compares_results, has_literal_left, has_plain_left

STATUSES = ("passed", "done", "not_written", "failing", "error", "hung", "not_checked", "course_error")
NOT_RAISED = re.compile(r"DID NOT RAISE (?:any of )?(?:<class ')?(\(.*\)|[\w.]+)")
EQUAL_CALL = re.compile(r"\bwhere False = (?:<[^>]*>|[\w.]*equal)\((.*)\)$", re.MULTILINE)
TOLD = re.compile(r"^Your code: (.*)\nExpected:  (.*)$", re.MULTILINE)
OTHER_WORDS = re.compile(r"^ *Expected regex: (.*)\n *Actual message: (.*)$", re.MULTILINE)
MOST_CALLS = 8
MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True)
class Result:
    """What a check found, about one task.

    status: one of STATUSES. passed: the whole lesson. done: this task, while others are open. failing: an assertion
        does not hold. error: the code raises, or Python stops. hung: it does not finish. not_checked: nothing could
        be run. course_error: the course's own tests are broken.
    task: its number; None if the result is about the whole lesson. is_likely: whether the task is only a guess.
    input: what the test did. expected, got: the sides of the comparison that failed. hint: one sentence.
    """

    status: str
    task: int | None = None
    is_likely: bool = False
    input: str = ""
    expected: str = ""
    got: str = ""
    hint: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def sides_of(failure: Failure) -> tuple[str, str]:
    """Return (got, expected) of the comparison that failed; empty if the failure compares nothing.

    The course's tests write `result == expected`, or name both sides in their message. A literal on the left is taken
    for the expected side; in other comparisons than `==`, so is a name, if only the right side asks an object.
    """
    if missing := NOT_RAISED.match(failure.message):
        return "no exception", missing[1].strip("()").replace(", ", " or ")
    if failure.tensors:
        return failure.tensors[0], failure.tensors[1]
    if failure.type != "AssertionError":
        return "", ""
    if other := OTHER_WORDS.search(failure.message):
        return value(other[2]), value(other[1])
    if told := TOLD.search(failure.message):
        return value(told[1]), value(told[2])
    compared = f"\n{failure.message}".partition("\nassert ")[2]
    if call := EQUAL_CALL.search(compared):
        return both_arguments(call[1])
    first = compared.splitlines()[0] if compared else ""
    left, op, right = split_comparison(first)
    if not op or (op != "==" and compares_results(failure)):
        return "", ""
    if op in ("in", "not in") and has_plain_left(failure):
        return value(right), value(f"{'something with' if op == 'in' else 'something without'} {left}")
    if has_literal_left(failure) if op == "==" else has_plain_left(failure):
        left, op, right = right, MIRRORED.get(op, op), left
    if op == "is" and left == right:
        return value(left), "the same object, not another one that is equal"
    return both(left, right) if op == "==" else (value(left), value(f"{op} {right}"))


def split_comparison(text: str) -> tuple[str, str, str]:
    """Return (left, operator, right) of a comparison of two values; the operator is empty if it is none."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:  # a repr such as <Request 3>
        left, op, right = text.partition(" == ")
        plain = op and " == " not in right and left.count("(") == left.count(")")
        return (left, "==", right) if plain else (text, "", "")
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or node.left.col_offset:  # `(1 == 2)` is a part of more
        return text, "", ""
    left, right = ast.get_source_segment(text, node.left) or "", ast.get_source_segment(text, node.comparators[0]) or ""
    return left, text[len(left) : len(text) - len(right)].strip(), right


def both_arguments(text: str) -> tuple[str, str]:
    """Return the two arguments of `torch.equal(…)` as its repr shows them."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            one, other = text[:index], text[index + 1 :].strip()
            return both(one_line(one), one_line(other))
    return "", ""


def one_line(text: str) -> str:
    return re.sub(r"\s*\\n\s*|\s{2,}", " ", text)


def calls_of(failure: Failure) -> list[str]:
    """Return the calls of a hypothesis state machine up to its failure; empty for other tests.

    Invariants, which hypothesis lists after each call, are left out, and so are all but the last calls.
    """
    lines = failure.notes.splitlines()
    names = [re.match(r"(?:[\w, ]+ = )?state\.(\w+)\(", line) for line in lines]
    calls = [(name[1], line.strip()) for name, line in zip(names, lines, strict=True) if name]
    plain = [name for name, line in calls if line.startswith("state.") and line.endswith("()")]
    checked = {name for name in plain if plain.count(name) > 1 and len(calls) >= 3}
    kept = [value(line, 100) for name, line in calls if name not in checked and name != "teardown"]
    return kept if len(kept) <= MOST_CALLS else [f"… {len(kept) - MOST_CALLS} earlier calls", *kept[-MOST_CALLS:]]


def input_of(failure: Failure) -> list[str]:
    """Return what the test did: its calls, hypothesis' example, or its lines up to the failing one."""
    if calls := calls_of(failure):
        return calls
    example = example_of(failure.notes)
    values = [f"with {example or failure.parameters}"] if example or failure.parameters else []
    return [*values, *failure.did]


def example_of(notes: str) -> str:
    """Return the arguments of hypothesis' failing example: `n=5, xs=[]`."""
    found = re.search(r"(?:Failing test case|Falsifying example): \w+\(\n(.*?)\n\)", notes, re.DOTALL)
    lines = found[1].splitlines() if found else []
    return value(" ".join(line.partition("  #")[0].strip() for line in lines).rstrip(","), 200)
