"""Course machinery. Parses Markdown pages: code blocks, headings, links and comments, with line numbers."""

import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED = {"node_modules", "build", "dist", "work", "shared"}
FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,}|~{3,})\s*(?P<info>.*?)\s*$")
COMMENT = re.compile(r"^\s*<!--\s*(?P<text>.*?)\s*-->\s*$")
HEADING = re.compile(r"^(?P<marks>#{1,6})\s+(?P<text>.*?)\s*#*\s*$")
LINK = re.compile(
    r"!?\[(?:[^\[\]]|\[[^\]]*\]|!\[[^\]]*\]\([^)]*\))*\]\((?P<target>[^()\s]+(?:\([^()]*\))?)(?:\s+\"[^\"]*\")?\)"
)
HTML_LINK = re.compile(r"""<(?:a|img|source)\b[^>]*?\b(?:href|src)=["'](?P<target>[^"']+)["']""")
ANCHOR = re.compile(r"""<[a-z]+\b[^>]*?\b(?:id|name)=["'](?P<name>[^"']+)["']""")
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its opening fence, from 1. comment: the HTML comment on the line before it."""

    line: int
    info: str
    indent: str
    lines: tuple[str, ...]
    comment: str = ""
    closed: bool = True

    @property
    def language(self) -> str:
        return re.split(r"[\s{]", self.info, maxsplit=1)[0].lower()


@dataclass(frozen=True)
class Heading:
    line: int
    level: int
    text: str


@dataclass(frozen=True)
class Link:
    line: int
    target: str


@dataclass
class Page:
    """One Markdown file, read once."""

    path: Path
    lines: list[str]
    blocks: list[Block] = field(default_factory=list)
    prose: list[tuple[int, str]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Page":
        return cls.parse(path, path.read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, path: Path, text: str) -> "Page":
        page = cls(path, text.splitlines())
        numbered = enumerate(page.lines, 1)
        comment = ""
        for number, line in numbered:
            fence = FENCE.match(line)
            if fence:
                page.blocks.append(_block(number, fence, numbered, comment))
            else:
                page.prose.append((number, line))
            if line.strip():
                said = COMMENT.match(line)
                comment = said["text"] if said and not fence else ""
        return page

    @property
    def headings(self) -> list[Heading]:
        found = ((number, HEADING.match(line)) for number, line in self.prose)
        return [Heading(number, len(match["marks"]), match["text"]) for number, match in found if match]

    @property
    def anchors(self) -> set[str]:
        """The valid targets of a `#…` link: GitHub's slug of each heading, and ids that the page defines."""
        names: dict[str, int] = {}
        anchors = {match["name"] for _, line in self.prose for match in ANCHOR.finditer(line)}
        for heading in self.headings:
            base = slug(heading.text)
            count = names.get(base, 0)
            names[base] = count + 1
            anchors.add(f"{base}-{count}" if count else base)
        return anchors

    @property
    def links(self) -> list[Link]:
        """All links and pictures outside code."""
        found = []
        for number, line in self.prose:
            bare = CODE.sub("", line)
            found += [Link(number, match["target"]) for kind in (LINK, HTML_LINK) for match in kind.finditer(bare)]
            found += [Link(number, match["target"]) for match in _inner_pictures(bare)]
        return found

    @property
    def inline_code(self) -> list[tuple[int, str]]:
        return [(number, match[0].strip("`").strip()) for number, line in self.prose for match in CODE.finditer(line)]

    def section(self, title: str) -> str:
        """Return the text under the heading `title` up to the next heading of its level; empty if there is none."""
        start = next((heading for heading in self.headings if heading.text == title), None)
        if start is None:
            return ""
        after = [h.line for h in self.headings if h.line > start.line and h.level <= start.level]
        return "\n".join(self.lines[start.line : after[0] - 1 if after else None])


def slug(heading: str) -> str:
    """Return GitHub's anchor for a heading: lower case, no punctuation, a hyphen for each space."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"<[^>]+>", "", text).replace("`", "").replace("*", "").strip().lower()
    kept = (c for c in text if c in "-_ " or unicodedata.category(c)[0] in "LNM")
    return "".join(kept).replace(" ", "-")


def find_pages(root: Path) -> list[Path]:
    """Return the repository's own Markdown files: nothing installed, built or kept in a student's `work/`."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in SKIPPED and not name.startswith("."))
        found += [Path(folder) / name for name in sorted(files) if name.endswith(".md")]
    return found


def _block(number: int, fence: re.Match, numbered: Iterator[tuple[int, str]], comment: str) -> Block:
    """Read a block up to its closing fence."""
    ticks, indent, lines = fence["ticks"], fence["indent"], []
    for _, line in numbered:
        end = FENCE.match(line)
        if end and not end["info"] and end["ticks"].startswith(ticks):
            return Block(number, fence["info"], indent, tuple(lines), comment)
        lines.append(line.removeprefix(indent))
    return Block(number, fence["info"], indent, tuple(lines), comment, closed=False)


def _inner_pictures(line: str) -> Iterator[re.Match]:
    """Find pictures inside links: `[![text](picture)](page)`."""
    return re.finditer(r"\[!\[[^\]]*\]\((?P<target>[^()\s]+)\)", line)
