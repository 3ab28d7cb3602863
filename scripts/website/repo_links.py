"""Course machinery. A Markdown extension for the website: points links to what it lacks to the repository.

A page may say `../../mini_engine/kv/token_flat.py`, which works on GitHub and in an editor. The website contains only
lessons/, without its Python files, so there such a link becomes the file's address in the repository. A link to a
missing file is a warning, which fails a strict build.
"""

import logging
import posixpath
from operator import attrgetter
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element

from scripts import ROOT

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

DOCS = "lessons"
BEFORE_MKDOCS = 1  # mkdocs processes links with priority 0
log = logging.getLogger("mkdocs.repo_links")


def page_path(md: Markdown) -> str | None:
    """Return the path of the page being converted, relative to lessons/, from mkdocs or Zensical; otherwise None."""
    if "relpath" in md.treeprocessors:
        return attrgetter("file.src_uri")(md.treeprocessors["relpath"])
    if "rendering_context" in md.preprocessors:
        return attrgetter("page.path")(md.preprocessors["rendering_context"])
    return None


def outside_path(link: str, page: str) -> str | None:
    """Return a link's target relative to the repository's root, or None if the website contains it.

    Args:
        link: as written on the page, such as `../../mini_engine/checkpoint/config.py#L10`.
        page: the page's path relative to lessons/, such as `l0_the_loop/README.md`.
    """
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path or parts.path.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(DOCS, posixpath.dirname(page), parts.path))
    is_inside = path == DOCS or (path.startswith(DOCS + "/") and not path.endswith((".py", ".toml")))
    return None if is_inside else path


class RepoLinks(Treeprocessor):
    """Rewrites the links and pictures of one page."""

    def __init__(self, md: Markdown, repo: str, branch: str):
        super().__init__(md)
        self.repo, self.branch = repo, branch

    def run(self, root: Element) -> None:
        page = page_path(self.md)
        if page is None:
            return
        for element in root.iter():
            for attribute in ("href", "src"):
                link = element.get(attribute)
                if link and (path := outside_path(link, page)) is not None:
                    element.set(attribute, self.address(path, link, page, is_picture=attribute == "src"))

    def address(self, path: str, link: str, page: str, is_picture: bool) -> str:
        """Return the address of `path` in the repository; warn if there is no such file."""
        target = ROOT / path
        if path.startswith("..") or not target.exists():
            log.warning("Doc file '%s' contains a link '%s', but the repository has no '%s'.", page, link, path)
        kind = "raw" if is_picture else "tree" if target.is_dir() else "blob"
        fragment = urlsplit(link).fragment
        return f"{self.repo}/{kind}/{self.branch}/{path}" + (f"#{fragment}" if fragment else "")


class RepoLinksExtension(Extension):
    def __init__(self, **settings):
        self.config = {
            "repo": ["", "the repository's address, such as https://github.com/OWNER/NAME"],
            "branch": ["main", "the branch that links lead to"],
        }
        super().__init__(**settings)

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(RepoLinks(md, **self.getConfigs()), "repo_links", BEFORE_MKDOCS)


def makeExtension(**settings) -> RepoLinksExtension:
    return RepoLinksExtension(**settings)
