"""Course machinery. The capstone and the interview page: each thread, and each answer, is rebuilt in lines that run.

Protects readers from an experiment that no longer shows anything: the engine's names move, a block without an assertion
would go on passing, and a command would print other figures than the page.
"""

import ast
import os
import shlex
import subprocess
import sys
from itertools import pairwise

import pytest

from lessons._course.pages import Block, Page
from lessons._course.places import Places

ROOT = Places.find().root
CAPSTONE, INTERVIEW = (Page.read(ROOT / "lessons" / name) for name in ("capstone.md", "interview.md"))
MOST_LINES = 30
BLOCKS = [(page, block) for page in (CAPSTONE, INTERVIEW) for block in page.blocks if block.language == "python"]
PRINTED = [(one, two) for one, two in pairwise(INTERVIEW.blocks) if (one.language, two.language) == ("bash", "text")]


def title_of(page: Page, block: Block) -> str:
    return max(
        (heading for heading in page.headings if heading.line < block.line), key=lambda heading: heading.line
    ).text


@pytest.mark.parametrize("page, block", BLOCKS, ids=[title_of(page, block) for page, block in BLOCKS])
def test_the_lines_run_are_few_and_show_both_results(page, block):
    source = "\n".join(block.lines)
    code = ast.parse(source)
    assert len(block.lines) <= MOST_LINES
    assert sum(isinstance(node, ast.Assert) for node in ast.walk(code)) >= 2, "what is wrong, and what is right"
    exec(compile(code, title_of(page, block), "exec"), {"__name__": page.path.stem})


@pytest.mark.nightly
@pytest.mark.parametrize("command, shown", PRINTED, ids=[title_of(INTERVIEW, command) for command, _ in PRINTED])
def test_a_command_prints_each_line_below_it(command, shown):
    """The page may leave lines out, and spaces between columns."""
    words = [sys.executable, *shlex.split(command.lines[0])[1:]]
    env = os.environ | {"COLUMNS": "200"}
    said = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", check=True).stdout
    printed = [line.split() for line in said.splitlines()]
    assert [line for line in shown.lines if line.split() not in printed] == []
