"""Course machinery. A Markdown extension for the website: a picture that links to a recorded trace becomes a player.

A page says `[![what it shows](pool.svg)](pool.trace.js)`. On GitHub that is a picture linked to its data; here the link
gets the class that player.js looks for. Text between `<!-- on GitHub -->` and `<!-- end -->` is only for readers on
GitHub, for example to say where the picture plays; the website leaves it out.
"""

import re
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor

BEFORE_MKDOCS = 1  # mkdocs rewrites links with priority 0
BEFORE_HTML = 30  # Markdown extracts raw HTML, including comments, with priority 20
GITHUB_ONLY = re.compile(r"<!-- on GitHub -->.*?<!-- end -->\s?", re.DOTALL)


class GitHubOnly(Preprocessor):
    """Removes the text meant only for readers on GitHub."""

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
