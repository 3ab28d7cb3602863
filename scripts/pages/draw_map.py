"""Course machinery. Draws the map of the engine's modules and writes its tables, from the source itself.

Boxes, lessons and descriptions come from the modules' docstrings, layers from `engine_modules.LAYERS`, and step numbers
from the list on the page: each module that an item links to gets the item's number.
"""

import re
from html import escape
from pathlib import Path

from scripts import ROOT
from scripts.pages.engine_modules import LAYERS, Module, in_order, read_modules
from scripts.pages.generated import fill

PAGE = ROOT / "lessons" / "how-the-pieces-fit.md"
PICTURE = ROOT / "lessons" / "how-the-pieces-fit.svg"
ITEM = re.compile(r"^(\d+)\. (.*(?:\n   .*)*)", re.MULTILINE)
LINK = re.compile(r"\]\(\.\./mini_engine/([\w/]+)\.py\)")

REPO = "https://github.com/kv-course/kv-course/blob/main"
WIDE, LEFT, MARGIN, BAND_GAP = 960, 230, 20, 26
COLUMNS, BOX_WIDE, BOX_HIGH, ACROSS, DOWN = 4, 171, 30, 177, 38
SHADES = ((94, 30), (87, 32), (80, 34), (73, 36), (66, 38), (44, 40), (39, 42), (34, 44), (30, 46), (26, 48), (22, 50))
STYLE = """
    .page { fill: #ffffff } .band { fill: #f6f8fb; stroke: #d5dae2 } .box { fill: #ffffff; stroke: #b4bdcb }
    .ink { fill: #1d2633 } .soft { fill: #535f72 } .arrow { stroke: #8a96a8; stroke-width: 2; fill: none }
    .head { fill: #8a96a8 } .mark { fill: #c2185b } .on { fill: #ffffff }
    .pale { fill: #1d2633 } .deep { fill: #ffffff }
    @media (prefers-color-scheme: dark) {
      .page { fill: #161b22 } .band { fill: #1b222b; stroke: #323b47 } .box { fill: #161b22; stroke: #465160 }
      .ink { fill: #e8edf4 } .soft { fill: #a2afc0 } .arrow { stroke: #6d7a8d } .head { fill: #6d7a8d }
      .mark { fill: #ff7eb0 } .on { fill: #161b22 }
    }"""


def steps_of(page: str) -> dict[str, list[int]]:
    """Map module names to the numbers of the list items that link to them."""
    steps: dict[str, list[int]] = {}
    for number, text in ITEM.findall(page):
        for path in dict.fromkeys(LINK.findall(text)):
            steps.setdefault(path.replace("/", "."), []).append(int(number))
    return steps


def text(x: float, y: float, words: object, style: str = "ink", size: float = 13, anchor: str = "start") -> str:
    where = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
    return f'  <text class="{style}" {where}>{escape(str(words))}</text>'


def rect(x: float, y: float, wide: float, high: float, style: str, corner: int = 5, fill: str = "") -> str:
    paint = f' style="fill: {fill}"' if fill else ""
    return f'  <rect class="{style}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="{corner}"{paint}/>'


def badge(x: float, y: float, lesson: int | None) -> list[str]:
    """Draw a lesson's number on a shade that deepens with the lesson; a dot for the course's machinery."""
    if lesson is None:
        return [text(x + 10, y + 15, "·", "soft", 14, "middle")]
    light, full = SHADES[min(lesson, len(SHADES) - 1)]
    style = "pale" if light > 50 else "deep"
    return [
        rect(x, y, 20, 20, "shade", 4, f"hsl(218, {full}%, {light}%)"),
        text(x + 10, y + 15, lesson, style, 13, "middle"),
    ]


def box(x: float, y: float, module: Module, steps: list[int]) -> list[str]:
    """Draw one module, as a link to its source: its lesson, its name, the steps that pass through it."""
    name = module.name.rpartition(".")[2]
    parts = [f'  <a href="{REPO}/{module.path}">', rect(x, y, BOX_WIDE, BOX_HIGH, "box")]
    parts += [*badge(x + 5, y + 5, module.lesson), text(x + 30, y + 20, name)]
    at = x + BOX_WIDE - 4 - sum(map(pill_width, steps))
    for step in steps:
        parts += pill(at, y + 6, step)
        at += pill_width(step)
    return [*parts, "  </a>"]


def pill_width(step: int) -> int:
    return 20 if step < 10 else 24


def pill(x: float, y: float, step: int) -> list[str]:
    wide = pill_width(step) - 2
    return [rect(x, y, wide, 18, "mark", 9), text(x + wide / 2, y + 13.5, step, "on", 12, "middle")]


def band(y: float, index: int, modules: list[Module], steps: dict[str, list[int]]) -> tuple[list[str], float]:
    """Draw one layer: its name, its modules folder by folder. Return the drawing and its height."""
    parts, line = [text(MARGIN + 14, y + 32, LAYERS[index].name, size=15)], y + 12
    folders: dict[str, list[Module]] = {}
    for module in modules:
        folders.setdefault(module.path.rpartition("/")[0], []).append(module)
    for folder, inside in sorted(folders.items(), key=lambda item: (-len(item[1]), item[0])):
        parts.append(text(LEFT - 12, line + 20, folder.removeprefix("mini_engine/") + "/", "soft", 12, "end"))
        for place, module in enumerate(inside):
            row, column = divmod(place, COLUMNS)
            parts += box(LEFT + ACROSS * column, line + DOWN * row, module, steps.get(module.name, []))
        line += DOWN * -(-len(inside) // COLUMNS)
    high = line + 4 - y
    return [rect(MARGIN, y, WIDE - 2 * MARGIN, high, "band", 8), *parts], high


def draw(modules: dict[str, Module], steps: dict[str, list[int]]) -> str:
    """Return the whole picture."""
    ordered = in_order(modules)
    parts, y = [], 52.0
    for index in range(len(LAYERS)):
        drawn, high = band(y, index, [module for module in ordered if module.layer == index], steps)
        parts += drawn
        y += high + BAND_GAP
        if index < len(LAYERS) - 1:
            parts.append(f'  <path class="arrow" d="M {WIDE / 2:g} {y - BAND_GAP + 3:g} v 13"/>')
            parts.append(f'  <path class="head" d="M {WIDE / 2 - 6:g} {y - 11:g} h 12 l -6 8 z"/>')
    high = y + 18
    legend = [*badge(MARGIN + 4, y - 14, 5), text(MARGIN + 32, y + 1, "the lesson that a module belongs to", "soft")]
    legend += [*pill(330, y - 13, 7), text(356, y + 1, "a step in the life of one request", "soft")]
    legend += [text(620, y + 1, "a module imports from its own layer and below", "soft")]
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high:g}" role="img" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif\">",
        "  <title>The engine's modules in six layers</title>",
        f"  <desc>{escape(described(ordered))}</desc>",
        f"  <style>{STYLE}\n  </style>",
        rect(0, 0, WIDE, high, "page", 10),
        text(MARGIN, 34, "What imports what: six layers, from the user interfaces down to plain facts", size=16),
    ]
    return "\n".join([*head, *parts, *legend, "</svg>", ""])


def described(ordered: list[Module]) -> str:
    """Describe the picture in words."""
    names = [", ".join(m.name for m in ordered if m.layer == index) for index in range(len(LAYERS))]
    return " ".join(f"{layer.name}: {here}." for layer, here in zip(LAYERS, names, strict=True))


def module_table(modules: dict[str, Module]) -> str:
    """Return the table of all modules: lesson, name, first docstring sentence."""
    folders = {int(path.name[1 : path.name.index("_")]): path.name for path in (ROOT / "lessons").glob("l[0-9]*_*")}
    rows = ["| lesson | module | what it is |", "| --- | --- | --- |"]
    for module in in_order(modules):
        number = module.lesson
        lesson = f"[{number}]({folders[number]}/README.md)" if number in folders else "" if number is None else number
        rows.append(f"| {lesson} | [`{module.name.replace('.', '/')}`](../{module.path}) | {module.line} |")
    return "\n".join(rows)


def layer_table() -> str:
    """Return the table of all layers: name, purpose, where its modules are."""
    rows = ["| layer | what it does | where |", "| --- | --- | --- |"]
    for layer in LAYERS:
        rows.append(f"| {layer.name} | {layer.says} | {', '.join(map(place_shown, layer.places))} |")
    return "\n".join(rows)


def place_shown(place: str) -> str:
    """Return the path of a package, with a trailing slash, or of a module."""
    path = place.replace(".", "/")
    return f"`{path}/`" if (ROOT / "mini_engine" / path).is_dir() else f"`{path}`"


def files() -> dict[Path, str]:
    """Return the contents that the page and the picture should have."""
    modules = read_modules()
    page = PAGE.read_text(encoding="utf-8")
    page = fill(page, "count", f"The engine consists of {len(modules)} modules, a file each.")
    page = fill(page, "layers", layer_table())
    page = fill(page, "modules", module_table(modules))
    return {PAGE: page, PICTURE: draw(modules, steps_of(page))}
