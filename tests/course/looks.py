"""Course machinery. What tests ask an open page: does anything stick out, is code cut, what axe says."""

from scripts import ROOT
from scripts.website.browser import DESKTOP, PHONE

import pytest

SOURCES = sorted(path.relative_to(ROOT / "lessons").as_posix() for path in (ROOT / "lessons").rglob("*.md"))
REPOSITORY = "https://github.com/kv-course/kv-course"
each_way = pytest.mark.parametrize("way", ["http", pytest.param("file", marks=pytest.mark.nightly)])
AXE = ROOT / "tests" / "course" / "vendor" / "axe" / "axe.min.js"
SCHEMES = {"light": "default", "dark": "slate"}  # as the theme names them
ALL_RULES, CONTRAST = {}, {"runOnly": ["color-contrast"]}  # what axe looks at
LOOKS = [("light", DESKTOP, ALL_RULES), ("light", PHONE, None), ("dark", PHONE, ALL_RULES), ("dark", DESKTOP, CONTRAST)]
EVERY_LOOK = [(scheme, width, ALL_RULES) for scheme in SCHEMES for width in (DESKTOP, PHONE)]

STICKS_OUT = """() => [...document.querySelectorAll("body, .kv-hero *, .md-content *, .md-footer *")].filter(part => {
    const box = part.getBoundingClientRect();
    if (part === document.body) return document.documentElement.scrollWidth > innerWidth;
    if (!box.width || box.right <= innerWidth + 1) return false;
    for (let up = part.parentElement; up; up = up.parentElement)
        if (getComputedStyle(up).overflowX !== "visible" && up.getBoundingClientRect().right <= innerWidth + 1)
            return false;
    return true;
}).slice(0, 3).map(part => "wider than the window: " + part.outerHTML.slice(0, 120))"""

RUN_AXE = """async ({place, ...rules}) => (
    await axe.run(place ?? document, {resultTypes: ["violations"], ...rules})).violations.flatMap(
    found => found.nodes.slice(0, 3).map(node => `${found.id}: ${found.help}: ${node.html.slice(0, 160)} ${
        [...node.any, ...node.all, ...node.none].map(check => check.message).join("; ").slice(0, 300)}`))"""

TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def show_as(page, scheme: str, width: int) -> None:
    """Give an open page another look."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 844})
    page.wait_for_function("name => document.body.dataset.mdColorScheme === name", arg=SCHEMES[scheme])
    page.evaluate(TWO_FRAMES)


def looked_over(page, looks=LOOKS, with_axe: bool = True) -> list[str]:
    """Return what sticks out of an open page, and what axe says of it, in each (scheme, width, axe's rules)."""
    found = []
    if with_axe:
        page.evaluate(AXE.read_text(encoding="utf-8"))
    for scheme, width, rules in looks:
        show_as(page, scheme, width)
        said = page.evaluate(STICKS_OUT)
        if with_axe and rules is not None:
            said += page.evaluate(RUN_AXE, rules)
        found += [f"{scheme}, {width} pixels wide: {text}" for text in said]
    return found


CUT = """() => [...document.querySelectorAll(".md-content pre > code")]
    .filter(code => code.scrollWidth > code.clientWidth + 1)
    .map(code => `${code.scrollWidth - code.clientWidth} pixels of code are cut: ${code.textContent.slice(0, 60)}`)"""

CUT_OUTPUT = """() => [...document.querySelectorAll(".md-content .kv-flows")].flatMap(line => {
    const room = line.closest("code").clientWidth, wide = line.scrollWidth;
    return wide > room + 1 ? [`a line of output is cut: ${line.textContent.slice(0, 60)}`] : [];
})"""

EMPTY_FIELDS = """() => [...document.querySelectorAll("td[data-label]")]
    .filter(cell => cell.getClientRects().length && !cell.textContent.trim() && !cell.querySelector("img, svg"))
    .map(cell => `a card has an empty field: ${cell.dataset.label}`)"""

# A table fits, or says that it scrolls and keeps the names of its rows in sight, for keyboards too.
CUT_TABLES = """async () => {
    const shut = [...document.querySelectorAll("details:not([open])")];
    shut.forEach(box => (box.open = true));
    await new Promise(done => setTimeout(done, 100)); // a box that has been opened is measured by course.js
    const cut = [...document.querySelectorAll(".md-content table")].filter(table => {
        const room = table.closest(".md-typeset__scrollwrap");
        if (!table.getClientRects().length) return false;
        if (!room || room.scrollWidth <= room.clientWidth + 1) return table.getBoundingClientRect().right > innerWidth;
        room.scrollLeft = room.scrollWidth;
        const name = table.querySelector("tbody tr > :first-child").getBoundingClientRect();
        const says = /^".+"$/.test(getComputedStyle(room, "::after").content);
        const seen = name.left >= 0 && name.right < innerWidth - 60;
        room.scrollLeft = 0;
        return !(says && seen && room.tabIndex === 0);
    }).map(table => "a table is cut: " + table.innerText.slice(0, 60));
    shut.forEach(box => (box.open = false));
    return cut;
}"""

# A reader who tabs through a page must see where they are.
STOPS_WITHOUT_A_BOX = """() => [...document.querySelectorAll(
        "a[href], button, input, select, textarea, summary, iframe, [tabindex], [contenteditable]")]
    .filter(part => part.tabIndex >= 0 && !part.disabled && !part.closest("[inert]"))
    .filter(part => part.checkVisibility({visibilityProperty: true}))
    .filter(part => Math.min(part.getBoundingClientRect().width, part.getBoundingClientRect().height) < 1)
    .slice(0, 3).map(part => "Tab stops at something of no size: " + part.outerHTML.slice(0, 120))"""

LINES = """() => { // characters a line: a paragraph's last line is half full, on average
    let [characters, lines] = [0, 0];
    for (const text of document.querySelectorAll(".kv-lesson > p:not(:has(figure))")) {
        const height = Math.round(text.getBoundingClientRect().height / parseFloat(getComputedStyle(text).lineHeight));
        if (height > 2) [characters, lines] = [characters + text.innerText.length, lines + height - 0.5];
    }
    return characters / lines;
}"""

MISFITS = """(figure, smallest) => {
    const found = [], svg = figure.querySelector(".kv-stage svg"), player = figure.player;
    for (let index = 0; index < player.trace.frames.length; index++) {
        player.show(index);
        const room = svg.getBoundingClientRect();
        for (const part of svg.querySelectorAll(":scope > :not(defs)")) {
            const box = part.getBoundingClientRect();
            if (!box.width && !box.height) continue;
            if (box.left < room.left - 2 || box.right > room.right + 2 || box.bottom > room.bottom + 2)
                found.push(`${index}: ${part.outerHTML.slice(0, 100)} is outside`);
            const scale = room.width / svg.viewBox.baseVal.width;
            if (part.tagName === "text" && parseFloat(getComputedStyle(part).fontSize) * scale < smallest - 0.1)
                found.push(`${index}: ${part.textContent} is too small`);
        }
    }
    return found.slice(0, 4);
}"""


# A figure with its tallest frame: where it begins on the page, and its height.
EXTENT = """figure => {
    const picture = figure.querySelector(".kv-stage > svg").getBoundingClientRect();
    const top = figure.getBoundingClientRect().top + scrollY;
    return [top, figure.offsetHeight - picture.height + figure.player.tallest];
}"""
SCREENS = [(1280, 720), (390, 664)]  # a small laptop's window, a phone's between the browser's bars
HEADER = "KvPlayer.header()"  # pixels


def figure_fits(page, figure, screen: tuple[int, int]) -> float:
    """Return the share of a player that is visible at once, with all its controls: on a laptop in a page's first
    screen if it begins there, otherwise below the site's header.
    """
    page.set_viewport_size(dict(zip(("width", "height"), screen, strict=True)))
    page.evaluate(TWO_FRAMES)
    top, height = figure.evaluate(EXTENT)
    is_first = screen[0] > screen[1] and top < screen[1] / 2
    return min(1, (screen[1] - (top if is_first else page.evaluate(HEADER))) / height)


# Scrolled through, each step of a text that follows a trace shows its frame, in a picture that is in sight.
FOLLOWS = """async share => {
    const box = document.querySelector(".kv-follow"), found = [];
    if (!box) return found;
    const header = KvPlayer.header();
    const painted = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    box.scrollIntoView();
    while (!box.follow?.player) await painted();
    const { steps, player } = box.follow;
    scrollBy(0, steps[0].getBoundingClientRect().top - box.follow.line - 40);
    for (let i = 0; i < 3; i++) await painted(); // it begins to listen
    for (const step of steps) {
        for (let i = 0; i < 999 && step.getBoundingClientRect().top > box.follow.line - 4; i++) scrollBy(0, 8);
        await painted();
        if (player.figure.dataset.index !== step.dataset.frame || !step.matches(".now"))
            found.push(`frame ${player.figure.dataset.index} beside the text of frame ${step.dataset.frame}`);
        const picture = player.figure.getBoundingClientRect();
        if (picture.top < header - 2 || picture.bottom > innerHeight || picture.height > share * innerHeight)
            found.push(`at frame ${step.dataset.frame} the picture is from ${picture.top} to ${picture.bottom}`);
    }
    return found;
}"""
SHARE = 0.4  # of a phone's height, for the picture

SMALLEST_TEXT = 11  # pixels
SMALLEST_CONTROL = 36  # for a finger
