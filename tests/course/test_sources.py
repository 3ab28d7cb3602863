"""Course machinery. The page about the four documents: each name in its tables exists in the module it links to.

Protects readers who come from one of the documents from a name that was changed here, and from a table that lost a row.
"""

import ast
import inspect
import re
import textwrap
from functools import cache
from importlib import import_module
from posixpath import normpath

from scripts import ROOT
from scripts.make_random_qwen3 import SHAPES

import pytest
import torch

from lessons._course.pages import Page
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.token_flat import pool_slots

PAGE = Page.read(ROOT / "lessons" / "sources.md")
TEXT = "\n".join(PAGE.lines)
CELL = re.compile(r"\[((?:`[^`]+`(?:, )?)+)\]\(([\w/.]+)\.py\)")
CELLS = [(normpath(f"lessons/{link}"), names) for names, link in CELL.findall(TEXT)]
NAMED = sorted({(path, name) for path, names in CELLS for name in re.findall(r"`([^`]+)`", names)})


@cache
def attributes_of(cls: type) -> set[str]:
    """Return the methods, the fields and what a class sets on itself, with those of the classes that it extends."""
    found = set()
    for base in cls.__mro__:
        if base.__module__.startswith(("mini_engine", "lessons")):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                match node:
                    case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                        found.add(name)
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        found.add(name)
    return found


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda value: value)
def test_a_name_in_the_tables_is_in_its_module(path, name):
    module = import_module(path.replace("/", "."))
    owner, parameter = re.fullmatch(r"([\w.]+)(?:\((\w+)\))?", name).groups()
    first, _, attribute = owner.partition(".")
    thing = getattr(module, first, None)
    assert thing is not None, f"{path}.py has no {first}"
    assert getattr(thing, "__module__", module.__name__) == module.__name__, f"{first} is only imported in {path}.py"
    assert not attribute or attribute in attributes_of(thing), f"{first} in {path}.py has no {attribute}"
    assert not parameter or parameter in inspect.signature(thing).parameters, f"{first} takes no {parameter}"


def test_the_figures_of_mini_sglang_are_lesson_2_s():
    config = Qwen3Config(**(SHAPES["0.6B"] | {"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128}))
    assert f"{config.kv_bytes_per_token(torch.bfloat16):,} bytes a token of Qwen3-8B" in TEXT
    assert f"8,192 slots are {BlockAllocator.for_slots(8192).num_blocks} blocks" in TEXT
    table = BlockTable(BlockAllocator.for_slots(8192))
    table.append(73)
    assert f"73 tokens are {len(table.blocks)} blocks" in TEXT
    lesson = (ROOT / "lessons/l2_token_flat/README.md").read_text(encoding="utf-8")
    assert f"{pool_slots(config, torch.bfloat16, 14 * 2**30):,}" in lesson, "100k tokens, to the slot"
