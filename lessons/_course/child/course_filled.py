"""Course machinery. In a process under `check`: puts the reference's bodies in place of tasks that are left for later.

KV_COURSE_FILLED maps a module's name to its `reference` (a file) and to the `symbols` whose bodies come from there. The
student's own lines keep their numbers: what is put in counts as one line, the last of the body that it replaces.
"""

import ast
import json
import os
from pathlib import Path

from course_overlay import FILLED

from lessons._course.starter import Function, find_function


def filled(name: str, source: bytes, path: str) -> ast.Module:
    """Return the syntax tree of the student's module with the bodies that are left for later."""
    tree = ast.parse(source, path)
    told = json.loads(os.environ[FILLED])[name]
    reference = ast.parse(Path(told["reference"]).read_text(encoding="utf-8"))
    for symbol in told["symbols"]:
        put(find_function(reference, symbol).body, find_function(tree, symbol))
    return tree


def put(body: list[ast.stmt], mine: Function) -> None:
    """Give `mine` a body from another file."""
    line = mine.end_lineno or mine.lineno
    for node in (part for statement in body for part in ast.walk(statement)):
        for name in node._attributes:  # the node's place; not every node has one
            setattr(node, name, line if name.endswith("lineno") else 0)
    mine.body = body
