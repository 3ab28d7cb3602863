"""Course machinery. A Markdown extension for the website: comments become parts of the engine's API.

`<!-- api -->` becomes the index of all names, `<!-- api: blocks -->` the group `blocks`.
"""

import re

from scripts.pages import api

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

HERE = re.compile(r"<!-- api(?:: (\w+))? -->")
BEFORE_HTML = 25  # after line ends are made equal (30), before blocks of HTML are set aside (20)


class ApiPage(Preprocessor):
    """Writes the API in place of the comment."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the page's lines; those without the comment as they are."""
        out: list[str] = []
        for line in lines:
            found = HERE.fullmatch(line)
            text = line if not found else api.group(found[1]) if found[1] else api.index()
            out += text.splitlines() or [""]
        return out


class ApiPageExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(ApiPage(md), "course_api", BEFORE_HTML)


def makeExtension(**settings) -> ApiPageExtension:
    return ApiPageExtension(**settings)
