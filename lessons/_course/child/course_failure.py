"""Course machinery. In a process under `check`: describes a failed test as data, for `check` to explain."""

import ast
import contextlib
import gc
import linecache
import re
import textwrap
import traceback
from pathlib import Path

TASK = re.compile(r"Lesson \d+, task (\d+)\b")
LONGEST_TEXT = 6000
LONGEST_VALUE = 2000
MOST_LINES = 12


def describe(error: BaseException, node) -> dict:
    """Describe a failure: its message, the unwritten task it ran into, its traceback, and what the test did."""
    error = heart_of(error)
    task = next((m[1] for e in chain(error) if isinstance(e, NotImplementedError) and (m := TASK.search(str(e)))), None)
    stack = traceback.extract_tb(error.__traceback__)
    return {
        "type": type(error).__name__,
        "message": str(error)[:LONGEST_TEXT],
        "notes": "\n".join(getattr(error, "__notes__", ()))[:LONGEST_TEXT],
        "task": int(task) if task else None,
        "syntax": [error.filename, error.lineno] if isinstance(error, SyntaxError) else None,
        **where(stack, node),
    }


def where(stack: traceback.StackSummary, node) -> dict:
    """Return the course's frames of a traceback, and the lines of the test up to the failing one."""
    ours = next((i for i, frame in enumerate(stack) if is_ours(Path(frame.filename), node.config.rootpath)), 0)
    return {
        "frames": [(frame.filename, frame.lineno, frame.name, frame.line) for frame in stack[ours:]],
        "did": what_it_did(stack, node),
        "statement": innermost_statement(stack[ours:], node),
        "parameters": parameters(node),
    }


def innermost_statement(stack: list[traceback.FrameSummary], node) -> str:
    """Return the source of the innermost failing statement in the course's files."""
    mine = [frame for frame in stack if is_ours(Path(frame.filename), node.config.rootpath)]
    if not mine:
        return ""
    source = linecache.getlines(mine[-1].filename)
    try:
        _, first, last = span(parse("".join(source)), mine[-1].lineno or 0)
    except (SyntaxError, SystemError, ValueError):
        return ""
    return textwrap.dedent("".join(source[first - 1 : last])).strip()[:LONGEST_VALUE]


def is_ours(path: Path, root: Path) -> bool:
    """Whether a frame belongs to the course: not to pytest, wherever it is installed, and not to this plugin."""
    return path.is_relative_to(root) and "site-packages" not in path.parts and path.parent != Path(__file__).parent


def what_it_did(stack: traceback.StackSummary, node) -> list[str]:
    """Return the test's statements from its start through the failing one; the last is marked with `>`.

    At most MOST_LINES; if there are more, the first ones are left out.
    """
    mine = [frame for frame in stack if frame.filename == str(node.path)]
    name = getattr(node, "originalname", "")
    named = [frame for frame in mine if frame.name == name]  # of a hypothesis test the first is its wrapper
    frame = (named or mine or [None])[-1]
    if frame is None or frame.lineno is None or frame.name == "<module>":
        return []
    source = linecache.getlines(frame.filename)
    try:
        first, failing, last = span(parse("".join(source)), frame.lineno)
    except (SyntaxError, SystemError, ValueError):
        return []
    lines = textwrap.dedent("".join(source[first - 1 : last])).splitlines()
    marked = [("> " if number >= failing else "  ") + text for number, text in enumerate(lines, first) if text.strip()]
    return marked if len(marked) <= MOST_LINES else ["  …", *marked[1 - MOST_LINES :]]


def parse(source: str) -> ast.Module:
    """Return the source's tree, with no garbage collected meanwhile.

    A finalizer may warn, and a warning's traceback parses; Python 3.11 counts the depth of both trees in one number
    and raises SystemError.
    """
    with no_collection():
        return ast.parse(source)


@contextlib.contextmanager
def no_collection():
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def span(tree: ast.Module, line: int) -> tuple[int, int, int]:
    """Return the first line of the body of the function around `line`, and the first and last of its statement there.

    Raises:
        ValueError: `line` is in no function.
    """
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= end(node)]
    functions = [node for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not functions:
        raise ValueError(f"line {line} is in no function")
    body = functions[-1].body
    text = ast.get_docstring(functions[-1], clean=False) is not None and len(body) > 1
    inner = around[-1]
    last = end(inner) if isinstance(inner, ast.With) or not hasattr(inner, "body") else line
    return body[1 if text else 0].lineno, min(inner.lineno, line), max(last, line)


def end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def parameters(node) -> str:
    """Return the values of a parametrized test, `x = 5, y = [1]`, as far as they are short."""
    values = getattr(getattr(node, "callspec", None), "params", {})
    texts = [f"{name} = {text}" for name, value in values.items() if len(text := name_or_repr(value)) < 60]
    return ", ".join(texts)


def name_or_repr(value) -> str:
    """Return a function's or class's name; of other values the repr."""
    return getattr(value, "__name__", None) or repr_of(value)


def compared(op: str, left, right) -> list[str]:
    """Return both sides of a comparison that failed, whole, and the first place where two sequences differ."""
    lines = [f"{repr_of(left)} {op} {repr_of(right)}"]
    if op == "==" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        lines += first_difference(left, right)
    return lines


def first_difference(left, right) -> list[str]:
    """Say at which index two sequences differ."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one is not other and not is_equal(one, other):
            return ["", f"At index {index}: {repr_of(one)}, expected {repr_of(other)}"]
    return ["", f"Its length is {len(left)}, expected {len(right)}"] if len(left) != len(right) else []


def is_equal(one, other) -> bool:
    try:
        return bool(one == other)
    except Exception:  # a tensor of several elements, for instance
        return repr_of(one) == repr_of(other)


def repr_of(value) -> str:
    """Return the value's repr in one line, without the spaces that align a tensor; whole, unless it is huge."""
    try:
        text = re.sub(r"\n\s*", " ", repr(value))
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} …"


def heart_of(error: BaseException) -> BaseException:
    """Return the underlying error: what broke a test file's import, or the first of hypothesis' exception group."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif type(error).__name__ == "CollectError" and error.__cause__:
            error = error.__cause__
        else:
            return error


def chain(error: BaseException | None):
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
