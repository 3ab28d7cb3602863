"""Course machinery. Parts, not subclasses: a later lesson plugs into a seam that earlier code names.

Protects rule 1 of CONTRIBUTING.md. Subclasses of another lesson's scheduler, or a runner replaced in a finished
engine, make two lessons exclude each other; parts that are handed in do not.
"""

import ast
import sys
from collections.abc import Iterator

from scripts import ROOT
from scripts.pages.engine_modules import read_modules

from mini_engine import LLM, SamplingParams

KINDS = ("Engine", "Scheduler", "Manager", "Table", "Tree", "Request", "Runner", "Worker")
PARTS = {
    "runner", "model", "pool", "kernel", "plan", "group", "scheduler", "manager", "coordinator", "memory", "decoding",
    "prefixes", "tree", "connector", "allocator", "slot_of", "slots_of", "drafter",
}  # fmt: skip
MOST_FILES = 20


def inherited(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield each class that inherits from an engine, a scheduler, … of another module."""
    home = {
        node.name: module for module, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    for module, tree in trees.items():
        for node in ast.walk(tree):
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                name = ast.unparse(base).rpartition(".")[2]
                if name.endswith(KINDS) and home.get(name, module) != module:
                    yield f"{module}: {node.name} inherits from {name} of {home[name]}"


def assigned(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield each assignment to a part of an object other than `self`."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in PARTS):
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield f"{module}, line {node.lineno}: {ast.unparse(node)} = …"
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and len(node.args) == 3:
                name = node.args[1]
                if isinstance(name, ast.Constant) and name.value in PARTS:
                    yield f"{module}, line {node.lineno}: {ast.unparse(node)}"


def the_engine() -> dict[str, ast.Module]:
    return {
        name: ast.parse((ROOT / module.path).read_text(encoding="utf-8")) for name, module in read_modules().items()
    }


def test_no_lesson_inherits_from_the_engine_of_another():
    assert not (found := list(inherited(the_engine()))), f"make it a part that is handed in: {found}"


def test_nothing_is_altered_after_it_was_made():
    assert not (found := list(assigned(the_engine()))), f"hand the part to the constructor: {found}"


def files_of_a_decode_step() -> set[str]:
    """Return the engine's files whose functions run in one decode step with the parts that a CPU gets by default."""
    found = set()

    def note(frame, event, argument):
        if event == "call" and "mini_engine" in (name := frame.f_code.co_filename):
            found.add(name.rpartition("mini_engine")[2].strip("/\\"))

    with LLM(num_blocks=32) as llm:
        engine = llm.engine
        engine.add_request("a", llm.encode("The capital of France is"), SamplingParams(max_tokens=8))
        for _ in range(4):
            engine.step()
        sys.setprofile(note)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
    return found


def test_a_token_s_way_is_short():
    found = files_of_a_decode_step()
    assert {"engine.py", "scheduler.py"} <= {name.rpartition("/")[2] for name in found}, "the step was not seen"
    assert len(found) <= MOST_FILES, f"a decode step crosses {len(found)} files: {sorted(found)}"
