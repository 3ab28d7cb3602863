"""Course machinery. The capstone page: each thread is rebuilt in lines that run.

Protects readers from a reproduction that no longer shows anything: the engine's names move, and a block without an
assertion would go on passing.
"""

import ast

import pytest

from lessons._course.pages import Block, Page
from lessons._course.places import Places

ROOT = Places.find().root
PAGE = Page.read(ROOT / "lessons" / "capstone.md")
MOST_LINES = 30
BLOCKS = [block for block in PAGE.blocks if block.language == "python"]


def title_of(block: Block) -> str:
    return max(
        (heading for heading in PAGE.headings if heading.line < block.line), key=lambda heading: heading.line
    ).text


@pytest.mark.parametrize("block", BLOCKS, ids=title_of)
def test_the_lines_run_are_few_and_show_both_results(block):
    source = "\n".join(block.lines)
    code = ast.parse(source)
    assert len(block.lines) <= MOST_LINES
    assert sum(isinstance(node, ast.Assert) for node in ast.walk(code)) >= 2, "what is wrong, and what is right"
    exec(compile(code, title_of(block), "exec"), {"__name__": "capstone"})
