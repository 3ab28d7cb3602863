"""Course machinery. A Markdown extension for the website: a page's date is that of its last commit, not of the build.

The sitemap and the foot of a page show it. Where there is no history, as in an unpacked archive, a page shows no
date and the sitemap has the build's. Zensical keeps pages elsewhere and shows none either.
"""

import functools
import subprocess
from operator import attrgetter

from scripts import ROOT
from scripts.website.repo_links import DOCS, page_path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

LAST = -11


@functools.cache
def dates() -> dict[str, str]:
    """Return the date of the last commit of each page, by its path in the repository."""
    command = ["git", "log", "--format=date %cs", "--name-only", "--no-renames", "--", f"{DOCS}/"]
    try:
        log = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    found: dict[str, str] = {}
    date = ""
    for line in log.splitlines():
        if line.startswith("date "):
            date = line.removeprefix("date ")
        elif line:
            found.setdefault(line, date)
    return found


class Updated(Treeprocessor):
    def run(self, root) -> None:
        page, links = page_path(self.md), self.md.treeprocessors
        date = dates().get(f"{DOCS}/{page}")
        if date and "relpath" in links:
            of_page = attrgetter("file.page")(links["relpath"])
            of_page.update_date = of_page.meta["updated"] = date


class UpdatedExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(Updated(md), "updated", LAST)


def makeExtension(**settings) -> UpdatedExtension:
    return UpdatedExtension(**settings)
