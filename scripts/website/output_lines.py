"""Course machinery. A Markdown extension for the website: lets a long line of a command's output go on below.

A line whose columns are aligned, or which is part of a drawing, would lose its meaning and stays in one piece. The
marked lines are wrapped by course.css.
"""

import re

from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

LAST = -10  # the blocks are HTML by then
BLOCK = re.compile(r'class="language-text highlight">.*?</pre>', re.DOTALL)
LINE = re.compile(r'<span (?=id="__line-[\d-]+">(?P<text>.*))')
ALIGNED = re.compile(r"\S {3,}\S|[\u2190-\u21ff\u2500-\u259f]")  # columns; arrows and boxes


def mark_line(line: re.Match[str]) -> str:
    return line[0] if ALIGNED.search(line["text"]) else f'{line[0]}class="kv-flows" '


class OutputLines(Postprocessor):
    """Marks the lines of a page's blocks of plain text that may be wrapped."""

    def run(self, text: str) -> str:
        return BLOCK.sub(lambda block: LINE.sub(mark_line, block[0]), text)


class OutputLinesExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.postprocessors.register(OutputLines(md), "output_lines", LAST)


def makeExtension(**settings) -> OutputLinesExtension:
    return OutputLinesExtension(**settings)
