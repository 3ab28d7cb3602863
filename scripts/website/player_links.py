"""Course machinery. A Markdown extension for the website: a picture that leads to a recorded trace becomes a player.

A page says `[![what it shows](pool.svg)](pool.trace.js)`. On GitHub that is a picture that links to its data; here the
link gets the class that player.js looks for. Text between `<!-- on GitHub -->` and `<!-- end -->` is for readers of
GitHub, such as where the picture plays; the website leaves it out.
"""

import re
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor

BEFORE_MKDOCS = 1  # mkdocs rewrites links with priority 0
BEFORE_HTML = 30  # Markdown takes raw HTML, comments too, out of a page with priority 20
GITHUB_ONLY = re.compile(r"<!-- on GitHub -->.*?<!-- end -->\s?", re.DOTALL)


class GitHubOnly(Preprocessor):
    """Leaves out of one page what only readers of GitHub need."""

    def run(self, lines: list[str]) -> list[str]:
        return GITHUB_ONLY.sub("", "\n".join(lines)).split("\n")


class PlayerLinks(Treeprocessor):
    """Marks the links of one page."""

    def run(self, root: Element) -> None:
        for link in root.iter("a"):
            if link.get("href", "").endswith(".trace.js"):
                link.set("class", f"{link.get('class', '')} kv-player".strip())


class PlayerLinksExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(GitHubOnly(md), "github_only", BEFORE_HTML)
        md.treeprocessors.register(PlayerLinks(md), "player_links", BEFORE_MKDOCS)


def makeExtension(**settings) -> PlayerLinksExtension:
    return PlayerLinksExtension(**settings)
