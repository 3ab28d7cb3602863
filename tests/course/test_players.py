"""Course machinery. The players as readers use them: played, stepped, answered and announced, on each page.

Protects readers from a player that stops, cannot be read or reached by keyboard, marks a right answer wrong or moves
the page. That a picture was drawn by today's views from today's trace is test_traces' business: it bears their digest.
"""

import re

from scripts.traces.pictures import PLAYER
from scripts.website.browser import DESKTOP, PHONE, visiting

import pytest

from tests.course.looks import ALL_RULES, AXE, RUN_AXE, each_way
from tests.course.test_traces import PATHS, TRACES

PAGES = {"README.md": "l8-tree"}
for name, path in PATHS.items():
    page = f"{path.parent.name}/README.md" if (path.parent / "README.md").is_file() else f"{path.parent.name}.md"
    PAGES[f"{page}#{name}" if page in PAGES else page] = name  # a page's second player has an address of its own
each_page = pytest.mark.parametrize("page", PAGES)


class Shown:
    """A player on a page that is open."""

    def __init__(self, page, name: str) -> None:
        self.page, self.trace = page, TRACES[name]
        self.frames = self.trace["frames"]
        self.figure = page.locator(f".kv-figure[data-trace={name}]")
        self.figure.wait_for()

    @property
    def index(self) -> int:
        return int(self.figure.get_attribute("data-index"))

    def button(self, name: str):
        return self.figure.get_by_role("button", name=name, exact=True)

    def is_at(self, index: int) -> None:
        """It shows this frame, and says it."""
        assert self.index == index
        assert self.figure.locator(".kv-say > span").inner_text().split() == self.frames[index]["say"].split()
        assert self.figure.locator(".kv-number").inner_text() == f"{index + 1} / {len(self.frames)}"


# Every frame that is shown is noted: how long a machine takes for one does not matter.
PLAY = """figure => {
    window.played = [];
    new MutationObserver(() => window.played.push(Number(figure.dataset.index)))
        .observe(figure, { attributeFilter: ["data-index"] });
    KvPlayer.pace = 0.004;
}"""


def plays_to_its_end(shown: Shown) -> None:
    """It opens on the frame that says most, plays every frame from there to the last, and steps back."""
    last, poster = len(shown.frames) - 1, shown.trace["poster"]
    first = poster + 1 if poster < last else 0
    assert poster > 0
    shown.is_at(poster)
    seconds = shown.figure.evaluate("figure => KvPlayer.waits(figure.player.trace).reduce((a, b) => a + b) / 1000")
    assert seconds <= 60, f"{shown.trace['id']} plays {seconds:.0f} s: readers leave a story of over a minute"
    shown.figure.evaluate(PLAY)
    shown.button("Play").click()
    shown.page.wait_for_function("last => played.at(-1) === last", arg=last)
    assert shown.page.evaluate("played") == list(range(first, last + 1)), "Play goes on from the frame shown"
    shown.is_at(last)
    shown.button("Step back").click()
    shown.is_at(last - 1)


@each_way
@each_page
def test_a_player_plays_to_its_end_steps_back_and_passes_its_quiz(page, way, site, browser):
    with visiting(browser, site, reduced_motion="reduce") as visitor:
        visitor.page.goto(site.url(page))
        shown = Shown(visitor.page, PAGES[page])
        plays_to_its_end(shown)
        passes_its_quiz(shown)
        assert not visitor.complaints


def scored(shown: Shown) -> list[int]:
    """Return how many answers were right, of how many."""
    return [int(number) for number in re.findall(r"\d+", shown.figure.locator(".kv-score").inner_text())]


def passes_its_quiz(shown: Shown) -> None:
    """Answer every question correctly, one frame after another."""
    shown.figure.locator("input[type=range]").fill("0")
    shown.figure.get_by_label("What happens next?").first.check()
    asked = 0
    for index, frame in enumerate(shown.frames[1:], 1):
        shown.button("Step forward").click()
        if "ask" in frame:
            asked += 1
            assert shown.index == index - 1, "it asks before it shows"
            quiz = shown.figure.locator(".kv-quiz")
            assert quiz.locator(".kv-question").inner_text() == frame["ask"]["question"]
            quiz.locator(".kv-options button").nth(frame["ask"]["right"]).click()
            quiz.get_by_role("button", name="Show it").click()
        assert shown.index == index
    assert scored(shown) == [asked, asked]


def test_a_wrong_answer_is_told_and_counted(visit):
    page = visit("l2_token_flat/README.md")
    shown = Shown(page, "l2-pool")
    shown.figure.get_by_label("What happens next?").first.check()
    shown.is_at(0)  # an untouched player asks from the start
    shown.button("Step forward").click()
    ask = shown.frames[1]["ask"]
    shown.figure.locator(".kv-options button").nth((ask["right"] + 1) % len(ask["options"])).click()
    assert str(ask["options"][ask["right"]]) in shown.figure.locator(".kv-why").inner_text()
    assert scored(shown) == [0, 1]


def test_the_keyboard_does_it_all(visit):
    page = visit("l5_scheduler/README.md")
    shown = Shown(page, "l5-timeline")
    last = len(shown.frames) - 1
    shown.figure.locator(".kv-stage").focus()
    keys = ("Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home")
    for key, index in zip(keys, (0, 1, 2, 1, last, last, 0), strict=True):
        page.keyboard.press(key)
        shown.is_at(index)
    page.keyboard.press(" ")
    shown.button("Pause").wait_for()
    page.keyboard.press(" ")
    shown.button("Play").wait_for()
    for speed in ("1×", "2×", "4×"):
        shown.button(f"Speed {speed}").press("Enter")
    shown.button("Speed 1×").wait_for()
    slider = shown.figure.get_by_role("slider")
    slider.focus()
    page.keyboard.press("ArrowRight")
    shown.is_at(1)
    assert slider.get_attribute("aria-valuetext") == f"Step 2 of {last + 1}"


@each_page
def test_axe_finds_nothing_while_a_player_asks(page, visit):
    tab = visit(page, reduced_motion="reduce")
    shown = Shown(tab, PAGES[page])
    first = next(index for index, frame in enumerate(shown.frames) if "ask" in frame)
    shown.figure.locator("input[type=range]").fill(str(first - 1))
    shown.figure.get_by_label("What happens next?").first.check()
    shown.button("Step forward").click()
    tab.evaluate(AXE.read_text(encoding="utf-8"))
    assert not tab.evaluate(RUN_AXE, ALL_RULES)
    shown.figure.locator(".kv-options button").first.click()
    assert not tab.evaluate(RUN_AXE, ALL_RULES)


def bare_page(folder, links: str) -> str:
    """Return the address of a page with only these links and the player."""
    script = f'<script src="{(PLAYER / "player.js").as_uri()}"></script>'
    path = folder / "page.html"
    path.write_text(f'<!doctype html><html lang="en"><title>Players</title>{links}{script}', encoding="utf-8")
    return path.as_uri()


def test_several_players_live_on_one_page_from_a_disk(tmp_path, browser):
    link = '<p><a class="kv-player" data-trace="{}" href="{}">a trace</a></p>'
    links = "".join(link.format(name, path.as_uri()) for name, path in PATHS.items())
    page = browser.new_page()
    page.goto(bare_page(tmp_path, links * 2))
    page.wait_for_function("count => document.querySelectorAll('.kv-figure').length === count", arg=2 * len(PATHS))
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(set(ids)) == len(ids)
    page.locator(".kv-figure").nth(1).get_by_role("button", name="Step forward").click()
    at = page.evaluate("[...document.querySelectorAll('.kv-figure')].map(node => node.dataset.index)")
    posters = [str(TRACES[name]["poster"]) for name in PATHS] * 2
    posters[1] = str(int(posters[1]) + 1)
    assert at == posters
    page.close()


def test_a_trace_that_is_missing_leaves_the_picture(tmp_path, browser):
    page = browser.new_page()
    page.goto(bare_page(tmp_path, '<a class="kv-player" data-trace="no" href="no.trace.js">still here</a>'))
    page.wait_for_timeout(200)
    assert page.locator("a.kv-player").inner_text() == "still here"
    page.close()


def framed(visitor, line: str):
    """Return the frame in a page that has nothing but a copied line."""
    visitor.page.goto(visitor.base + "player.html")  # without the site's scripts
    visitor.page.set_content(f"<h1>Another site</h1>{line}")
    frame = visitor.page.wait_for_selector("iframe").content_frame()
    frame.wait_for_selector(".kv-figure svg.kv-art")
    return frame


@pytest.mark.parametrize("page", ["l0_the_loop/README.md", "l18_ranks/README.md"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_a_player_can_be_embedded_as_it_stands(page, width, site_http, browser):
    with visiting(browser, site_http, width=width, permissions=["clipboard-read", "clipboard-write"]) as visitor:
        visitor.page.goto(site_http.url(page))
        shown = Shown(visitor.page, PAGES[page])
        untouched = shown.index
        lines = []
        for move in (None, "Step back"):
            if move:
                shown.button(move).click()
            shown.button("Embed: copy the line").click()
            shown.figure.get_by_text("Copied").wait_for()
            lines.append(visitor.page.evaluate("navigator.clipboard.readText()"))
        for line, index in zip(lines, (untouched, untouched - 1), strict=True):
            frame = framed(visitor, line)
            assert frame.query_selector(".kv-figure").get_attribute("data-index") == str(index)
            assert frame.evaluate("document.documentElement.scrollHeight <= innerHeight"), "nothing in it scrolls"
            assert frame.query_selector("a[target=_top]").get_attribute("href") == page.replace("README.md", "")
            assert not frame.query_selector_all(".kv-bar button[aria-label^=Embed]"), "a frame offers no frame"
        assert not visitor.complaints


def test_a_frame_of_what_is_not_a_player_says_so(site_http, browser):
    with visiting(browser, site_http) as visitor:
        for asked in (
            "",
            "?show=l5_scheduler/no-such",
            "?show=../l5_scheduler/batch",
            "?show=<img src=x onerror=alert(1)>",
        ):
            visitor.page.goto(site_http.base + "player.html" + asked)
            visitor.page.locator("body > p a").wait_for()
            assert not visitor.page.locator("figure").count()
            assert visitor.page.locator("script:not([src]), img").count() == 0
            assert not visitor.outside


def test_a_picture_that_leads_to_a_trace_becomes_a_player_and_no_other_link_does():
    markdown = pytest.importorskip("markdown", reason="the site's Markdown: pip install --group docs")
    text = "[![a pool](pool.svg)](pool.trace.js) and [a page](pool.md)"
    html = markdown.markdown(text, extensions=["scripts.website.player_links"])
    assert '<a class="kv-player" data-file="pool.trace.js" href="pool.svg">' in html
    assert html.count("kv-player") == 1
