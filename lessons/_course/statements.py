"""Course machinery. Reads in a failed test's source what it asserts, which side is expected, and what had to raise."""

import ast
import textwrap

from lessons._course.output import value
from lessons._course.report import Failure

LONGEST_CALL = 80


def has_literal_left(failure: Failure) -> bool:
    """Whether the test's assertion is `literal == something`."""
    test = asserted(failure)
    return isinstance(test, ast.Compare) and is_literal(test.left) and not is_literal(test.comparators[0])


def has_plain_left(failure: Failure) -> bool:
    """Whether the test's assertion has a value that the test itself knows on the left, as in `name in result.text`."""
    test = asserted(failure)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:  # of `1 < x < 3` the failing part is not known
        return False
    return has_literal_left(failure) or (is_plain(test.left) and not is_plain(test.comparators[0]))


def compares_results(failure: Failure) -> bool:
    """Whether the test's assertion compares two results, as in `a.b < c.b`, of which neither is the expected side."""
    test = asserted(failure)
    return isinstance(test, ast.Compare) and not any(map(is_plain, [test.left, *test.comparators]))


def is_plain(node: ast.expr) -> bool:
    """Whether an expression has names and literals only, besides `len`: it asks no object and calls no other function.

    In a comparison it is the expected side: `most`, or `2 * len(ids)`.
    """
    calls = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    return not any(isinstance(part, ast.Attribute) for part in ast.walk(node)) and all(
        isinstance(name, ast.Name) and name.id == "len" for name in calls
    )


def subject_of(failure: Failure) -> str:
    """Return the expression whose value is the `got` side: `len(free)`, or the call that made it; empty if unknown."""
    test = asserted(failure)
    if isinstance(test, ast.Call) and test.args and ast.unparse(test.func).endswith(("equal", "allclose", "close")):
        return in_short(test.args[0], failure)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return ""
    is_mirrored = has_literal_left(failure) if isinstance(test.ops[0], ast.Eq) else has_plain_left(failure)
    return in_short(test.comparators[0] if is_mirrored else test.left, failure)


def in_short(node: ast.expr, failure: Failure) -> str:
    """Return an expression's source; of a name that the test has just assigned a call, that call."""
    made = assigned(failure, node.id) if isinstance(node, ast.Name) else None
    return "" if is_literal(node) else value(ast.unparse(made if isinstance(made, ast.Call) else node), LONGEST_CALL)


def asserted_text(failure: Failure) -> str:
    """Return what the failing assertion demands as source; empty if it is not known or says nothing."""
    test = asserted(failure)
    return "" if test is None or is_literal(test) else value(ast.unparse(test), LONGEST_CALL)


def compares_returned(failure: Failure) -> bool:
    """Whether the test's assertion is about what a call returned: `take(2) == [0]`, or `got == [0]` after `got = …`."""
    test = asserted(failure)
    if not isinstance(test, ast.Compare):
        return False
    left = assigned(failure, test.left.id) if isinstance(test.left, ast.Name) else test.left
    return isinstance(left, ast.Call) and getattr(left.func, "attr", "") != "get"  # None from `get`: it is not there


def assigned(failure: Failure, name: str) -> ast.expr | None:
    """Return what the test last assigned to `name`, alone or beside others, if that was in one line."""
    for line in reversed(failure.did):
        try:
            node = ast.parse(line[1:].strip()).body[0]
        except (SyntaxError, IndexError):
            continue
        if isinstance(node, ast.Assign):
            names, values = (x.elts if isinstance(x, ast.Tuple) else [x] for x in (node.targets[0], node.value))
            for left, right in zip(names, values, strict=False):
                if isinstance(left, ast.Name) and left.id == name and len(names) == len(values):
                    return right
    return None


def asserted(failure: Failure) -> ast.expr | None:
    """Return what the failing assertion demands, as it stands in the test or in a function that the test calls."""
    for statement in (failing_statement(failure), parsed(failure.statement)):
        if isinstance(statement, ast.Assert):
            return statement.test
        if isinstance(statement, ast.Expr) and "assert_close" in ast.unparse(statement)[:40]:
            return statement.value
    return None


def called_to_raise(failure: Failure) -> tuple[str, str]:
    """Return (function, arguments) of the call under `with pytest.raises(…)`, the last one there; empty if unknown."""
    statement = failing_statement(failure)
    while isinstance(statement, ast.With | ast.For):
        statement = statement.body[-1]
    called = getattr(statement, "value", None)
    if not isinstance(called, ast.expr) or is_literal(called):
        return "", ""
    if not isinstance(called, ast.Call):
        return value(ast.unparse(called), LONGEST_CALL), ""
    name, whole = ast.unparse(called.func), ast.unparse(called)
    if "(" in name:  # of an object that is made here, only the method is told
        name, whole = name.rpartition(".")[2], whole[len(name) - len(name.rpartition(".")[2]) :]
    return name, value(whole[len(name) :], LONGEST_CALL)


def expected_error(failure: Failure) -> str:
    """Return which exception a `with pytest.raises(…):` around the failing line expects; empty if there is none."""
    marked = next((i for i, line in enumerate(failure.did) if line.startswith("> ")), 0)
    around = parsed(f"{failure.did[marked - 1].strip()} pass") if marked else None
    call = around.items[0].context_expr if isinstance(around, ast.With) else None
    if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("raises") or not call.args:
        return ""
    kinds = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else call.args[:1]
    return " or ".join(map(ast.unparse, kinds))


def failing_statement(failure: Failure) -> ast.stmt | None:
    """Return the statement at which the test failed."""
    return parsed("\n".join(line[2:] for line in failure.did if line.startswith("> ")))


def parsed(text: str) -> ast.stmt | None:
    """Return the first statement of some source."""
    try:
        return ast.parse(textwrap.dedent(text).strip()).body[0]
    except (SyntaxError, IndexError):
        return None


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True
