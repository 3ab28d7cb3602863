"""Course machinery. One visit to each page, on a laptop and on a phone in the dark, and to each player on it.

Protects readers from what a change of a page breaks most often: a table or code that is cut, a drawing that leaves its
frame or has pale text, a player that stops, an error in the console. All pages share a tab. The other looks, the site
read from disk and axe on every page are nightly: test_site.py, test_players.py.
"""

from collections.abc import Iterator

from scripts.website.browser import PHONE, Visitor, visiting
from scripts.website.measures import FAINT, LEAST_CONTRAST, MOST_SHIFTED, SHIFTS, TALLEST
from scripts.website.player_links import place_of

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from tests.course import looks
from tests.course.looks import REPOSITORY, SOURCES
from tests.course.test_players import PAGES, Shown, plays_to_its_end, scored
from tests.course.test_traces import TRACES

LAPTOP = 1440
LESSONS = {f"{lesson.id}/README.md" for lesson in read_lessons(Places.find())}
# Three kinds of pages, at which axe looks here; at night test_site.py lets it look at every page, in every look.
COLOURFUL = {"README.md", "l2_token_flat/README.md", "l9_speed/README.md"}
# Of the API's pages, all of one shape and made by one generator, CI visits one.
ALIKE = {source for source in SOURCES if source.startswith("api/")} - {"api/attention.md"}

LINKS = """figure => figure.player.trace.frames.map((_, i) => {
    figure.player.show(i);
    const link = figure.querySelector(".kv-say a");
    return [link.offsetHeight > 0, link.href, link.textContent];
})"""
LOW_CONTROLS = """(figure, smallest) => [...figure
    .querySelectorAll(".kv-bar :is(button, input):not([hidden]), .kv-ask")]
    .filter(control => control.getBoundingClientRect().height < smallest)
    .map(control => "too low: " + control.outerHTML)"""
WALK = "how-the-pieces-fit.md"
MOVES = ".kv-strip + p + *, h1 + p + *"  # what a lesson has under its title


@pytest.fixture(scope="module")
def tab(site_http, browser) -> Iterator[Visitor]:
    """Open the tab in which all pages are visited."""
    with visiting(browser, site_http, width=LAPTOP, reduced_motion="reduce") as visitor:
        yield visitor


@pytest.mark.ci
@pytest.mark.parametrize(
    "source", [pytest.param(source, marks=pytest.mark.nightly if source in ALIKE else ()) for source in SOURCES]
)
def test_a_page_and_its_players_are_whole(source, tab, site_http):
    page = tab.page
    tab.forget()
    page.goto(site_http.url(source))
    shift, moved = page.evaluate(SHIFTS)
    shown = [Shown(page, name) for place, name in PAGES.items() if place.partition("#")[0] == source]
    for player in shown:
        plays_to_its_end(player)
        asks_and_knows_the_answer(player)
        leads_to_its_functions(player)
    if source == WALK:
        enters_its_stations(page, shown[0])
    if source in COLOURFUL:
        page.evaluate(looks.AXE.read_text(encoding="utf-8"))
    was_wide = page.viewport_size["width"] == LAPTOP  # the last page's second look is this one's first
    found = [f"moves by {shift:.2f} while it loads: {moved}"] if shift > MOST_SHIFTED else []
    for is_wide in (was_wide, not was_wide):
        looks.show_as(page, *(("light", LAPTOP) if is_wide else ("dark", PHONE)))
        found += on_a_laptop(page, source) if is_wide else on_a_phone(page)
        found += page.evaluate(looks.STICKS_OUT) + page.evaluate(looks.STOPS_WITHOUT_A_BOX)
        if is_wide == was_wide:
            found += page.evaluate(looks.FOLLOWS, 1 if is_wide else looks.SHARE)
        if source in COLOURFUL:
            found += page.evaluate(looks.RUN_AXE, looks.ALL_RULES if is_wide == was_wide else looks.CONTRAST)
        for player in shown:
            found += player.figure.evaluate(looks.MISFITS, looks.SMALLEST_TEXT)
            found += player.figure.evaluate(LOW_CONTROLS, looks.SMALLEST_CONTROL)
    found += page.evaluate(FAINT, LEAST_CONTRAST)  # in both schemes
    for player in shown:
        found += cut_off(page, player)
    found += tab.complaints
    assert not found, f"{source}:\n" + "\n".join(found)


def on_a_laptop(page, source: str) -> list[str]:
    """Return which code is cut, and what makes a page hard to read in one go."""
    found = page.evaluate(looks.CUT)
    height = page.evaluate("document.documentElement.scrollHeight")
    if height > TALLEST:
        found.append(f"{height} pixels high, more than {TALLEST}: fold what is looked up")
    if source in LESSONS:
        line = page.evaluate(looks.LINES)
        if not 65 <= line <= 78:
            found.append(f"{line:.0f} characters a line: give 65 to 78")
        first = page.locator(MOVES).first
        if not first.locator("figure.kv-figure").count() and "kv-" not in first.get_attribute("class"):
            found.append("under the title is no player and no tool")
    return found


def on_a_phone(page) -> list[str]:
    """Return which tables and lines of output are cut, and which cards have fields without a value."""
    return [
        text for script in (looks.CUT_TABLES, looks.CUT_OUTPUT, looks.EMPTY_FIELDS) for text in page.evaluate(script)
    ]


def cut_off(page, shown: Shown) -> list[str]:
    """Return the screens on which a reader cannot see a whole player, and leave the page as the last look did."""
    size = page.viewport_size
    shares = {screen: looks.figure_fits(page, shown.figure, screen) for screen in looks.SCREENS}
    page.set_viewport_size(size)
    page.evaluate(looks.TWO_FRAMES)
    return [
        f"{share:.0%} of {shown.trace['id']} is visible at {width} × {height}: make its view lower"
        for (width, height), share in shares.items()
        if share < 1
    ]


def asks_and_knows_the_answer(shown: Shown) -> None:
    """Its first question comes before what it asks for; the right answer counts."""
    first, ask = next((index, frame["ask"]) for index, frame in enumerate(shown.frames) if "ask" in frame)
    shown.figure.locator("input[type=range]").fill(str(first - 1))
    shown.figure.get_by_label("What happens next?").first.check()
    shown.button("Step forward").click()
    assert shown.index == first - 1, "it asks before it shows"
    assert shown.figure.locator(".kv-question").inner_text() == ask["question"]
    shown.figure.locator(".kv-options button").nth(ask["right"]).click()
    assert scored(shown) == [1, 1]
    shown.figure.get_by_label("What happens next?").first.uncheck()


def enters_its_stations(page, shown: Shown) -> None:
    """A link or a click on a station opens its lesson's player over the page, Escape closes it; one is marked."""
    stations, inside = shown.trace["scene"]["stations"], page.locator("dialog figure.kv-figure")
    links = page.locator(".kv-stations a")
    assert links.count() == len(stations), "the links stand in the order of the trace's stations"
    for link, station in zip(links.all(), stations, strict=True):
        link.press("Enter")
        assert TRACES[inside.get_attribute("data-trace")]["file"] == station["trace"]
        lesson = page.locator("dialog a", has_text="Open lesson")
        assert lesson.get_attribute("href") == link.evaluate("link => link.href")
        page.keyboard.press("Escape")
        inside.wait_for(state="detached")
        assert link.evaluate("link => link === document.activeElement"), "the focus is back where it was"
    shown.figure.locator(".door.at-sampler").click()
    assert inside.get_attribute("data-trace") == "l4-logits"
    page.keyboard.press("Escape")
    inside.wait_for(state="detached")
    at = [station["name"] for station in stations].index(shown.frames[shown.index]["at"])
    assert links.evaluate_all("links => links.map(link => link.hasAttribute('aria-current'))").index(True) == at


def leads_to_its_functions(shown: Shown) -> None:
    """Each frame has a link to the function that made it."""
    for frame, (is_seen, href, words) in zip(shown.frames, shown.figure.evaluate(LINKS), strict=True):
        file, first, last = place_of(frame["code"])
        assert is_seen and href == f"{REPOSITORY}/blob/main/{file}#L{first}-L{last}"
        assert words == frame["code"].partition("::")[2].rpartition(".")[2]
