"""Course machinery. A Markdown extension for the website: the comment `<!-- api -->` becomes the engine's API."""

from scripts.pages import api

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

HERE = "<!-- api -->"
BEFORE_HTML = 25  # after line ends are made equal (30), before blocks of HTML are set aside (20)


class ApiPage(Preprocessor):
    """Writes the API in place of the comment."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the page's lines; those without the comment as they are."""
        if HERE not in lines:
            return lines
        index = lines.index(HERE)
        return [*lines[:index], *api.text().splitlines(), *lines[index + 1 :]]


class ApiPageExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(ApiPage(md), "course_api", BEFORE_HTML)


def makeExtension(**settings) -> ApiPageExtension:
    return ApiPageExtension(**settings)
