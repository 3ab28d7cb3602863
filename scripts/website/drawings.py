"""Course machinery. A Markdown extension for the website: a drawing becomes part of its page instead of an image.

In the page it has the page's fonts and follows the palette button. Charts are drawings too, no wider than they were
drawn (scripts/bench/plot.py). A player takes the place of its picture, which stays an image and says how large it is,
so that the text below it does not move when it arrives.
"""

import re
from pathlib import Path
from xml.etree.ElementTree import Element

from scripts import ROOT
from scripts.website.repo_links import DOCS, page_path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

BEFORE_LINKS = 2.5  # mkdocs would rewrite the image's address (0)
DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{(.*?\})\s*\}", re.DOTALL)
RULE = re.compile(r"([^{}]+)(\{[^}]*\})")
IDS = re.compile(r'\bid="([^"]+)"')
REFERENCE = re.compile(r"""(url\(["']?#|href="#)([^"')]+)""")
VIEW_BOX = re.compile(r'<svg[^>]*\bviewBox="\S+ \S+ (\S+) (\S+)"')
FITS_A_PHONE = 520  # units: at this width, text of 16 is still 11 pixels high there
BADGE = 60  # pixels: anything less high, such as a button's picture, stays an image
OF_STYLE = re.compile(r'\[style\*="([^"]*)"\] \{[^}]*\}')  # a chart's rule for one colour
IN_POINTS = re.compile(r'<svg[^>]* width="[\d.]+pt"')  # matplotlib's charts


def scoped(css: str, scope: str) -> str:
    """Return the rules with every selector prefixed by `scope`."""
    return "".join(
        ", ".join(f"{scope} {one.strip()}" for one in selectors.split(",")) + f" {body}\n"
        for selectors, body in RULE.findall(css)
    )


def with_own_ids(svg: str, name: str) -> str:
    """Return the drawing with `name` before each of its ids, also in its rules: `marker-end: url(#tip)`."""
    own = set(IDS.findall(svg))
    svg = IDS.sub(rf'id="{name}-\1"', svg)
    return REFERENCE.sub(lambda found: f"{found[1]}{name}-{found[2]}" if found[2] in own else found[0], svg)


def in_page(svg: str, name: str, words: str) -> str:
    """Return the drawing for a page: with its own rules, ids and colours, and the page's font.

    Args:
        name: of the file, without its suffix; it must be unique on the page.
        words: the text alternative.
    """
    svg = with_own_ids(svg, name)
    css = "".join(re.findall(r"<style>(.*?)</style>", svg, re.DOTALL))
    dark = "".join(DARK.findall(css))
    dark = OF_STYLE.sub(lambda rule: rule[0] if svg.count(rule[1]) > css.count(rule[1]) else "", dark)
    rules = scoped(DARK.sub("", css), f".drawing-{name}")
    rules += scoped(dark, f'[data-md-color-scheme="slate"] .drawing-{name}')
    wide = (float(box[1]) if (box := VIEW_BOX.search(svg)) else 0) * (4 / 3 if IN_POINTS.search(svg) else 1)
    fits = 0 < wide <= FITS_A_PHONE
    if fits or IN_POINTS.search(svg):
        rules += f".md-typeset .drawing-{name} {{ max-width: {round(wide)}px }}\n"
    svg = re.sub(r"<style>.*?</style>|<!--.*?-->|<title>.*?</title>|<desc>.*?</desc>", "", svg, flags=re.DOTALL)
    head, _, body = svg[svg.index("<svg") :].partition(">")
    if kinds := re.search(r' class="([^"]*)"', head):  # its rules ask for this class above what they match
        body = f'<g class="{kinds[1]}">{body.replace("</svg>", "</g></svg>")}'
    head = re.sub(r' (role|font-family|aria-label|aria-labelledby|class|width|height)="[^"]*"', "", head)
    if IN_POINTS.search(svg):
        body = compact(body)
    kind = " drawing--fits" if fits else ""
    marks = f'class="drawing drawing-{name}{kind}" role="img" aria-label="{words}" data-search-exclude=""'
    return f"{head} {marks}>\n<style>\n{rules}</style>{body}"


def compact(body: str) -> str:
    """Return a chart's shapes in fewer bytes, drawn alike: without spaces, turns by nothing and names never used."""
    body = re.sub(r"\s*\n\s*", " ", body).replace("> <", "><")
    used = set(re.findall(r"#([\w-]+)", body))
    body = re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else "", body)
    return re.sub(r' transform="rotate\(-0 [^"]*"| text-anchor: start;', "", body)


class Drawings(Treeprocessor):
    """Inlines the drawings of one page."""

    def run(self, root: Element) -> None:
        page = page_path(self.md)
        if page is None:
            return
        folder = (ROOT / DOCS / page).parent
        for paragraph in root.iter("p"):
            image = only_image(paragraph)
            path = folder / image.get("src", "") if image is not None else folder
            if image is not None and path.suffix == ".svg" and is_drawing(svg := path.read_text(encoding="utf-8")):
                shown = self.md.htmlStash.store(in_page(svg, path.stem, quoted(image.get("alt", ""))))
                link = paragraph[0]
                paragraph.clear()
                paragraph.tag = "div"
                paragraph.set("class", "drawing-room")
                if link.tag == "a" and link.get("href") != image.get("src"):  # it leads to a page
                    link.remove(image)
                    paragraph.append(link)
                    link.text = shown
                else:
                    paragraph.text = shown
        for image in root.iter("img"):
            say_size(image, folder / image.get("src", ""))


def is_drawing(svg: str) -> bool:
    """Return True if a picture has text that should be in the page's font, and is not a badge."""
    box = VIEW_BOX.search(svg)
    return "<text" in svg and not (box and float(box[2]) < BADGE)


def say_size(image: Element, path: Path) -> None:
    """Write a picture's width and height, in pixels, into the image; the style sheet fits them to the page."""
    if path.suffix != ".svg" or not path.is_file():
        return
    svg = path.read_text(encoding="utf-8")
    if box := VIEW_BOX.search(svg):
        pixels = 4 / 3 if IN_POINTS.search(svg) else 1
        image.set("width", str(round(float(box[1]) * pixels)))
        image.set("height", str(round(float(box[2]) * pixels)))
        image.set("loading", "lazy")  # its space is reserved


def only_image(paragraph: Element) -> Element | None:
    """Return the image that is all of a paragraph, alone or as a link, if it does not become a player."""
    if len(paragraph) != 1 or (paragraph.text or "").strip() or (paragraph[0].tail or "").strip():
        return None
    only = paragraph[0]
    if only.tag == "a" and len(only) == 1 and not only.get("href", "").endswith(".trace.js"):
        only = only[0]
    return only if only.tag == "img" else None


def quoted(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


class DrawingsExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(Drawings(md), "drawings", BEFORE_LINKS)


def makeExtension(**settings) -> DrawingsExtension:
    return DrawingsExtension(**settings)
