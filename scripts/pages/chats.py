"""Course machinery. The course's picture: six chats grow one tree, and a counter shows the tokens saved.

All of it comes from lessons/l8_radix/tree.trace.js, recorded from lesson 8's engine. A cell is a block of a prompt, in
the colour of the chat that computed it; a dot below is a chat that found the block instead. `data-at` is the step of
the animation in which a shape appears; assets/show/chats.js plays it, and without scripts everything is visible.
"""

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from scripts import ROOT
from scripts.pages.generated import fill
from scripts.traces.tape import read_trace

FOLDER = ROOT / "lessons" / "l8_radix"
TRACE, PICTURE, EMBED = FOLDER / "tree.trace.js", FOLDER / "chats.svg", FOLDER / "chats.html"
THEME = ROOT / "site" / "theme"
HERO, STYLE = THEME / "partials" / "hero-chats.html", THEME / "assets" / "show" / "chats.css"
CELL, PITCH, GAP, ROW, TOP, LEFT = 27, 31, 13, 52, 10, 20
WIDTH, LABEL = 400, 15  # of the picture, and of a question's line in characters
NARROW = 11  # characters of a line below the trunk
ASKED = re.compile(r"“(.*?)”")
Path = tuple[int, ...]  # of a block in the tree: the blocks from the root to it


@dataclass
class Chat:
    """One chat: the number of its prompt's tokens found, and the blocks of its prompt as paths from the root."""

    name: str
    tokens: int
    found: int
    question: str = ""
    blocks: list[int] = field(default_factory=list)

    @property
    def paths(self) -> list[Path]:
        return [tuple(self.blocks[: i + 1]) for i in range(len(self.blocks))]


def read_chats() -> tuple[list[Chat], int]:
    """Return the chats in the order in which they arrived, and the tokens of a block."""
    trace = read_trace(TRACE.read_text(encoding="utf-8"))
    size = trace["scene"]["block_size"]
    chats: dict[str, Chat] = {}
    for frame in trace["frames"]:
        asked = ASKED.search(frame["say"])
        for table in frame["tables"]:
            chat = chats.setdefault(table["name"], Chat(table["name"], table["tokens"], table["found"]))
            chat.found = max(chat.found, table["found"])  # one that waits a step finds more
            chat.question = chat.question or (asked[1] if asked else "")
            whole = table["blocks"][: chat.tokens // size]
            chat.blocks = max(chat.blocks, whole, key=len)
    questions = {tuple(chat.blocks): chat.question for chat in chats.values() if chat.question}
    for chat in chats.values():
        chat.question = questions[tuple(chat.blocks)]
    return list(chats.values()), size


@dataclass(frozen=True)
class Place:
    x: float
    y: float


def places(chats: list[Chat]) -> dict[Path, Place]:
    """Return the place of each block: further right with its depth, a row for each different prompt."""
    paths = list(dict.fromkeys(path for chat in chats for path in chat.paths))
    children: dict[Path, list[Path]] = {path: [] for path in [(), *paths]}
    for path in paths:
        children[path[:-1]].append(path)
    branches = {len(path) for path, below in children.items() if len(below) > 1}
    found: dict[Path, Place] = {}
    rows = iter(range(len(paths)))

    def put(path: Path) -> float:
        """Place `path` and its descendants, and return the height of its row: its middle child's, or a new one."""
        heights = [put(child) for child in children[path]]
        y = heights[(len(heights) - 1) // 2] if heights else TOP + ROW * next(rows)
        depth = len(path) - 1
        found[path] = Place(LEFT + depth * PITCH + GAP * sum(branch <= depth for branch in branches), y)
        return y

    put(())
    del found[()]
    return found


def trunk(chats: list[Chat]) -> tuple[int, str]:
    """Return the number of blocks that all chats share, and the words in them."""
    shared = 0
    while len({tuple(chat.blocks[: shared + 1]) for chat in chats}) == 1:
        shared += 1
    trace = read_trace(TRACE.read_text(encoding="utf-8"))
    nodes = [node for frame in trace["frames"] for node in frame["nodes"]]
    words = next(node["text"] for node in nodes if node["blocks"] == chats[0].blocks[:shared])
    return shared, words.removeprefix("system ")


def cells(chats: list[Chat], size: int) -> Iterator[tuple[int, str]]:
    """Yield (step, shape): for each chat its arrival, then its blocks, one a step."""
    where = places(chats)
    holders: dict[Path, int] = {}
    made: dict[Path, str] = {}
    step = 0
    for chat in chats:
        step += 1
        for path in chat.paths:
            step += 1
            at = where[path]
            if len(path) * size <= chat.found:
                dot = holders[path] = holders.get(path, 0) + 1
                x = at.x + 3.5 + 5.2 * (dot - 1)
                yield step, f'<circle class="{chat.name.lower()}" cx="{x:.1f}" cy="{at.y + CELL + 5}" r="2.1"/>'
            else:
                kind = "again" if path in made else "cell"
                made[path] = chat.name
                yield step, f'<rect class="{kind} {chat.name.lower()}" {box(at)}/>'
        step += 1
        yield step, badge(chat, where[chat.paths[-1]], [one.name for one in chats if one.blocks == chat.blocks])


def box(at: Place) -> str:
    return f'x="{at.x:g}" y="{at.y:g}" width="{CELL}" height="{CELL}" rx="4"'


def badge(chat: Chat, leaf: Place, same: list[str]) -> str:
    """Return the chat's letter after the last block of its prompt."""
    x, y = leaf.x + CELL + 16 + 23 * same.index(chat.name), leaf.y + CELL / 2
    letter = f'<text x="{x:g}" y="{y + 4.5:g}" class="letter">{chat.name}</text>'
    return f'<g class="{chat.name.lower()}"><circle class="disc" cx="{x:g}" cy="{y:g}" r="10"/>{letter}</g>'


def ground(chats: list[Chat]) -> Iterator[str]:
    """Yield the shapes of the first step: the places of blocks, the lines between them, the questions."""
    where = places(chats)
    for path, at in where.items():
        before = where.get(path[:-1])
        x, y = (before.x + CELL, before.y + CELL / 2) if before else (8, at.y + CELL / 2)
        middle = x + (at.x - x) / 2
        yield f'<path class="way" d="M{x:g} {y:g}H{middle:g}V{at.y + CELL / 2:g}H{at.x:g}"/>'
    yield from (f'<rect class="room" {box(at)}/>' for at in where.values())
    yield from named_trunk(chats, where)
    for chat in {tuple(chat.blocks): chat for chat in reversed(chats)}.values():
        at = where[chat.paths[-1]]
        lines = textwrap.wrap(chat.question, LABEL)
        for i, line in enumerate(lines):
            y = at.y + CELL / 2 + 4.5 + 15 * (i - (len(lines) - 1) / 2)
            yield f'<text class="question" x="{at.x + CELL + 56:g}" y="{y:g}">{escape(line)}</text>'


def named_trunk(chats: list[Chat], where: dict[Path, Place]) -> Iterator[str]:
    """Yield what the trunk is: its name above a bracket, its words below the dots."""
    shared, words = trunk(chats)
    first, last = (where[tuple(chats[0].blocks[:depth])] for depth in (1, shared))
    left, right, y = first.x, last.x + CELL, first.y
    yield f'<path class="trunk" d="M{left:g} {y - 5:g}v-4H{right:g}v4"/>'
    yield f'<text class="trunk" x="{(left + right) / 2:g}" y="{y - 15:g}">system prompt</text>'
    for i, line in enumerate(textwrap.wrap(f"“{words}”", NARROW, break_long_words=False)):
        yield f'<text class="words" x="{left:g}" y="{y + CELL + 25 + 15 * i:g}">{escape(line)}</text>'


def svg(attributes: str = "", style: str = "") -> str:
    """Return the picture with everything in it."""
    chats, size = read_chats()
    high = max(at.y for at in places(chats).values()) + CELL + 14
    shapes = [shape.replace(" ", f' data-at="{step}" ', 1) for step, shape in cells(chats, size)]
    inside = "\n".join([*ground(chats), *shapes])
    head = f'<svg class="kv-tree" viewBox="0 0 {WIDTH} {high:g}" role="img" aria-label="{ALT}"{attributes}>'
    return f"{head}{style}\n{inside}\n</svg>"


ALT = (
    "A tree of blocks. Six chats begin with the same system prompt, the trunk: the first chat computed its blocks, and "
    "a dot below a block stands for each chat that found it there."
)


def steps(chats: list[Chat], size: int) -> list[list]:
    """Return for each step the tokens found so far, the prompt tokens so far, and a caption."""
    found = tokens = 0
    rows: list[list] = [[0, 0, "Six chats arrive."]]
    for chat in chats:
        tokens += chat.tokens
        say = f"{chat.name} asks: {chat.question}"
        rows.append([found, tokens, say])
        for i in range(len(chat.blocks)):
            found += size if (i + 1) * size <= chat.found else 0
            rows.append([found, tokens, say])
        computed = chat.tokens - chat.found
        rows.append([found, tokens, f"{chat.name}: {chat.found} of {chat.tokens} tokens found, {computed} computed"])
    return rows


def figure(more: str) -> str:
    """Return the picture with its counter. more: HTML for its foot."""
    chats, size = read_chats()
    rows = steps(chats, size)
    found, tokens, _ = rows[-1]
    data = escape(json.dumps(rows, separators=(",", ":")))
    return (
        f'<figure class="kv-chats" data-steps="{data}" aria-labelledby="kv-chats-title">\n'
        '<figcaption class="kv-chats__head" id="kv-chats-title"><strong>Six chats, one system prompt</strong> '
        "<span>what they share is computed once</span></figcaption>\n"
        f'<p class="kv-chats__sum">Saved: <b>{found}</b> of <span>{tokens}</span> prompt tokens '
        f'(<span>{100 * found / tokens:.0f} %</span>) <i style="--part:{found / tokens:.3f}"></i></p>\n{svg()}\n'
        f'<p class="kv-chats__say">A square is a block of {size} tokens; a dot, a chat that found it computed.</p>\n'
        f"{more}</figure>"
    )


def embedded() -> str:
    """Return the page for another site's frame."""
    link = '<p class="kv-chats__foot"><a href="index.html" target="_top">Lesson 8 of the KV course</a></p>\n'
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n<meta name="robots" content="noindex">\n'
        '<title>Six chats, one system prompt</title>\n<link rel="icon" href="../assets/favicon.svg">\n'
        '<link rel="stylesheet" href="../assets/show/chats.css">\n'
        '<script defer src="../assets/show/chats.js"></script>\n'
        f'</head>\n<body class="kv-embedded">\n{figure(link)}\n</body>\n</html>\n'
    )


def files() -> dict:
    """Return the files to write, with their texts."""
    style = f"<style>\n{STYLE.read_text(encoding='utf-8').partition('/* The figure */')[0]}</style>"
    alone = svg(' xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif"', style)
    hero = HERO.read_text(encoding="utf-8")
    return {PICTURE: alone + "\n", EMBED: embedded(), HERO: fill(hero, "chats", figure("{{ foot }}"))}
