"""Course machinery. A Markdown extension for the website: a picture that leads to a recorded trace becomes a player.

A page says `[![what it shows](pool.svg)](pool.trace.js)`. On GitHub that is a picture that links to its data; here the
link gets the class that player.js looks for.
"""

from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

BEFORE_MKDOCS = 1  # mkdocs rewrites links with priority 0


class PlayerLinks(Treeprocessor):
    """Marks the links of one page."""

    def run(self, root: Element) -> None:
        for link in root.iter("a"):
            if link.get("href", "").endswith(".trace.js"):
                link.set("class", f"{link.get('class', '')} kv-player".strip())


class PlayerLinksExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(PlayerLinks(md), "player_links", BEFORE_MKDOCS)


def makeExtension(**settings) -> PlayerLinksExtension:
    return PlayerLinksExtension(**settings)
