"""Course machinery. Makes the starter: the reference without the bodies of its tasks, found in the syntax tree."""

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator, Mapping

from lessons._course.places import CourseError

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLANK = re.compile(r"Lesson \d+, task (\d+)\b")


def task_message(lesson: int, task: int, title: str) -> str:
    """Return the message that an unwritten body raises: "Lesson 2, task 1: Write K and V into their slots"."""
    return f"Lesson {lesson}, task {task}: {title}"


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Yield functions and classes with their dotted names, including those in classes but not those in functions."""
    for node in getattr(tree, "body", []):
        if isinstance(node, Function | ast.ClassDef):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from definitions(node, prefix + node.name + ".")


def find_function(tree: ast.AST, symbol: str) -> Function:
    """Return the function or method called `symbol`.

    Raises:
        CourseError: there is none, there are several, or it is a class.
    """
    found = [node for name, node in definitions(tree) if name == symbol]
    if len(found) != 1 or not isinstance(found[0], Function):
        what = "does not exist" if not found else "is defined more than once" if len(found) > 1 else "is a class"
        raise CourseError(f"{symbol} {what}; a task's target must be one function or method")
    return found[0]


def make_starter(source: str, blanks: Mapping[str, str]) -> str:
    """Return `source` with the body of each symbol in `blanks` reduced to its docstring and a NotImplementedError.

    Comments in or after the body are removed too, up to the next line indented no deeper than its `def`.

    Args:
        blanks: maps a symbol to the message of its NotImplementedError.
    """
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    nodes = [(find_function(tree, symbol), message) for symbol, message in blanks.items()]
    for node, message in sorted(nodes, key=lambda pair: pair[0].lineno, reverse=True):
        first, last = node.lineno - 1, _end_of_body(node, lines)
        lines[first:last] = _signature(node, lines) + _docstring(node, source) + [_raise(node, message)]
    return "".join(lines)


def blank_symbols(source: str) -> set[str]:
    """Return the functions that consist only of a docstring and a task's NotImplementedError."""
    return {
        name
        for name, node in definitions(ast.parse(source))
        if isinstance(node, Function) and _is_blank(_without_docstring(node))
    }


def signatures(source: str) -> dict[str, str]:
    """Return what callers see of each function and class: parameters, defaults, decorators, bases, fields.

    Annotations are left out, because callers do not notice them.
    """
    outline: dict[str, list[str]] = {}
    for name, node in definitions(ast.parse(source)):
        text = _call(node) if isinstance(node, Function) else _declaration(node)
        outline.setdefault(name, []).append(text)
    return {name: " / ".join(texts) for name, texts in outline.items()}


def fingerprint(source: str) -> str:
    """Return a digest of the syntax tree without docstrings and comments, so that rewording does not change it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def _end_of_body(node: Function, lines: list[str]) -> int:
    """Return the index after the body's last line, trailing comments included."""
    end = last = node.end_lineno or node.lineno
    for index in range(last, len(lines)):
        text = lines[index].lstrip()
        if text and not (text.startswith("#") and len(lines[index]) - len(text) > node.col_offset):
            break
        end = index + 1 if text else end
    return end


def _signature(node: Function, lines: list[str]) -> list[str]:
    """Return the lines from `def` to its colon. A body on the same line is cut off, a comment is kept."""
    text = "".join(lines[node.lineno - 1 :])
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    row, column = _colon(tokens)
    header = text.splitlines(keepends=True)[:row]
    if next(tokens).type not in (tokenize.COMMENT, tokenize.NEWLINE):
        header[-1] = header[-1][:column] + "\n"
    return header


def _colon(tokens: Iterator[tokenize.TokenInfo]) -> tuple[int, int]:
    """Read up to the colon that ends a `def`. Return the row and column after it."""
    depth = 0
    for token in tokens:
        if token.type != tokenize.OP:
            continue
        depth += (token.string in "([{") - (token.string in ")]}")
        if token.string == ":" and depth == 0:
            return token.end
    raise ValueError("no colon ends this `def`")


def _docstring(node: Function, source: str) -> list[str]:
    if ast.get_docstring(node, clean=False) is None:
        return []
    return [_indent(node) + (ast.get_source_segment(source, node.body[0]) or "") + "\n"]


def _indent(node: Function) -> str:
    first = node.body[0]
    return " " * (first.col_offset if first.lineno > node.lineno and first.col_offset > node.col_offset else 0) or (
        " " * (node.col_offset + 4)
    )


def _raise(node: Function, message: str) -> str:
    quoted = '"' + message.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{_indent(node)}raise NotImplementedError({quoted})\n"


def _without_docstring(node: Function) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def _is_blank(body: list[ast.stmt]) -> bool:
    return len(body) == 1 and isinstance(body[0], ast.Raise) and bool(BLANK.search(ast.unparse(body[0])))


def _call(node: Function) -> str:
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    decorators = "".join(f"@{ast.unparse(decorator)} " for decorator in node.decorator_list)
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{decorators}{prefix}({ast.unparse(arguments)})"


def _declaration(node: ast.ClassDef) -> str:
    decorators = "".join(f"@{ast.unparse(decorator)} " for decorator in node.decorator_list)
    bases = ", ".join(ast.unparse(base) for base in [*node.bases, *(k.value for k in node.keywords)])
    fields = [
        ast.unparse(item.target) + (f"={ast.unparse(item.value)}" if item.value else "")
        for item in node.body
        if isinstance(item, ast.AnnAssign)
    ]
    return f"{decorators}class({bases})" + (f" with {', '.join(fields)}" if fields else "")
