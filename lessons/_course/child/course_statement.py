"""Course machinery. In a process under `check`: the statement of the course at which a test failed.

It says what was compared, demanded or called, so that a verdict can name it. Which side is the expected one is no
question of the source: tests write `got == expected` and `expected in got`.
"""

import ast
import contextlib
import gc
import linecache
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONGEST = 80
COMPARING = ("equal", "allclose", "assert_close")


class Statement(NamedTuple):
    """A statement of the file `path`: lines `first` to `last`; the function around it begins at line `start`."""

    path: str
    start: int
    first: int
    last: int
    node: ast.stmt
    function: ast.FunctionDef | ast.AsyncFunctionDef

    def holds(self, path: str, line: int) -> bool:
        """Whether this place is in the statement."""
        return path == self.path and self.first <= line <= self.last

    @property
    def demand(self) -> ast.expr | None:
        """What it asserts."""
        if isinstance(self.node, ast.Assert):
            return self.node.test
        called = getattr(self.node, "value", None)
        is_close = isinstance(called, ast.Call) and ast.unparse(called.func).endswith("assert_close")
        return called if is_close else None

    @property
    def is_chain(self) -> bool:
        """Whether it is a comparison of three, which begins with a bound: `2 < token < 9`."""
        test = self.demand
        return isinstance(test, ast.Compare) and len(test.ops) > 1 and isinstance(test.left, ast.Constant)

    @property
    def claim(self) -> str:
        """What it asserts, as source; empty if that says nothing, as `False` does."""
        return "" if self.demand is None else in_short(self.demand)

    @property
    def subject(self) -> str:
        """The expression that had to be something else: `len(free)`; of a name, the call that it was assigned."""
        test = self.demand
        if isinstance(test, ast.Compare):
            node = test.comparators[0] if isinstance(test.ops[0], ast.In | ast.NotIn) else test.left
        elif isinstance(test, ast.Call) and test.args and ast.unparse(test.func).endswith(COMPARING):
            node = test.args[0]
        else:
            return ""
        made = self._made(node.id) if isinstance(node, ast.Name) else None
        return in_short(made if isinstance(made, ast.Call) else node)

    @property
    def called(self) -> tuple[str, str]:
        """(function, arguments) of the last call in the block of a `with`; empty if there is none."""
        node: ast.stmt = self.node
        while isinstance(node, ast.With | ast.For):
            node = node.body[-1]
        call = getattr(node, "value", None)
        if not isinstance(call, ast.Call):
            return (in_short(call), "") if isinstance(call, ast.expr) else ("", "")
        name, whole = ast.unparse(call.func), ast.unparse(call)
        if "(" in name:  # of an object that is made here, only the method is told
            name, whole = name.rpartition(".")[2], whole[len(name) - len(name.rpartition(".")[2]) :]
        return name, cut(whole[len(name) :])

    def _made(self, name: str) -> ast.expr | None:
        """Return what the function last assigned to `name` before this statement, alone or beside others."""
        assigns = [
            node for node in ast.walk(self.function) if isinstance(node, ast.Assign) and node.lineno < self.first
        ]
        for node in sorted(assigns, key=lambda node: -node.lineno):
            names, values = (
                side.elts if isinstance(side, ast.Tuple) else [side] for side in (node.targets[0], node.value)
            )
            for left, right in zip(names, values, strict=False):
                if isinstance(left, ast.Name) and left.id == name and len(names) == len(values):
                    return right
        return None


def statement_at(path: str, line: int | None) -> Statement | None:
    """Return the statement of a function at this line of a file; None if there is none."""
    try:
        tree = parse("".join(linecache.getlines(path)))
    except (SyntaxError, SystemError, ValueError):
        return None
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= (line or 0) <= end(node)]
    functions = [node for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not functions or line is None:
        return None
    body, inner = functions[-1].body, around[-1]
    has_text = ast.get_docstring(functions[-1], clean=False) is not None and len(body) > 1
    last = end(inner) if isinstance(inner, ast.With) or not hasattr(inner, "body") else line
    return Statement(path, body[int(has_text)].lineno, min(inner.lineno, line), max(last, line), inner, functions[-1])


def lines_to(statement: Statement, most: int) -> list[str]:
    """Return the function's lines through the statement, whose own lines are marked with `>`; at most so many."""
    source = linecache.getlines(statement.path)[statement.start - 1 : statement.last]
    lines = enumerate(textwrap.dedent("".join(source)).splitlines(), statement.start)
    marked = [("> " if number >= statement.first else "  ") + text for number, text in lines if text.strip()]
    return marked if len(marked) <= most else ["  …", *marked[1 - most :]]


def is_ours(path: Path, root: Path) -> bool:
    """Whether a file belongs to the course: not to pytest, wherever it is installed, and not to this plugin."""
    return path.is_relative_to(root) and "site-packages" not in path.parts and path.parent != Path(__file__).parent


def parse(source: str) -> ast.Module:
    """Return the source's tree, with no garbage collected meanwhile.

    A finalizer may warn, and a warning's traceback parses; Python 3.11 counts the depth of both trees in one number
    and raises SystemError.
    """
    with no_collection():
        return ast.parse(source)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def in_short(node: ast.expr) -> str:
    """Return an expression's source; empty for a literal."""
    try:
        ast.literal_eval(node)
    except ValueError:
        return cut(ast.unparse(node))
    return ""


def cut(text: str) -> str:
    """Return source without its middle, if it is long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
