"""Course machinery. Texts that follow a trace: each part names a frame that exists, in order, and has its still.

Protects readers from a picture that shows something else than the paragraph beside it, after a trace was recorded
again. That scrolling shows the frames is looked at on each page's visit: test_visits.py.
"""

import re

from scripts.traces.followed import sections
from scripts.website.browser import visiting

import pytest

from tests.course.looks import TWO_FRAMES
from tests.course.test_traces import PATHS, TRACES

PAGES = {page: path.parent.name for path in PATHS.values() if (page := path.with_name("README.md")).exists()}
FOLLOWED = {name: found for page, name in PAGES.items() if (found := sections(page.read_text(encoding="utf-8")))}
FRAMES = {path: TRACES[name]["frames"] for name, path in PATHS.items()}
OPEN, STEP = "<!-- follow: x.trace.js -->", "<!-- frame: 1 Pool.free -->"
DRAWN = "[...document.querySelectorAll('.kv-step')].map(step => step.querySelector('.kv-drawn')?.offsetHeight ?? 0)"
NOW = "[...document.querySelectorAll('.kv-step[aria-current]')].map(step => step.dataset.frame)"
EDGE = {"x": 8, "y": 44}  # beside its words, which may be a link
each_followed = pytest.mark.parametrize("name", FOLLOWED)


@each_followed
def test_each_part_of_a_text_names_a_frame_and_the_function_that_made_it(name):
    (section,) = FOLLOWED[name]
    (path,) = (path for path in FRAMES if path.parent.name == name and path.name == section.file)
    assert not section.complaints(FRAMES[path])
    indices = [index for index, _ in section.steps]
    assert 4 <= len(indices) <= 10
    assert indices == sorted(set(indices)), "a text goes through the run in its order, and shows a frame once"


@each_followed
def test_without_scripts_each_part_has_its_still(name, site_http, browser):
    with visiting(browser, site_http, width=900, java_script_enabled=False) as visitor:
        visitor.page.goto(site_http.url(f"{name}/README.md"))
        stills = visitor.page.locator(".kv-step img.kv-still")
        shown = [re.sub(r".*#frame-", "", still.get_attribute("src")) for still in stills.all()]
        assert shown == [str(index) for index, _ in FOLLOWED[name][0].steps]
        for still in stills.all():
            still.scroll_into_view_if_needed()
            assert still.evaluate("still => still.decode().then(() => still.naturalWidth)") > 0
        assert not visitor.complaints


@each_followed
def test_on_paper_each_part_has_its_still_and_with_scripts_no_file_is_fetched_for_it(name, site_http, browser):
    with visiting(browser, site_http) as visitor:
        asked = []
        visitor.page.on("request", lambda request: asked.append(request.url))
        visitor.page.goto(site_http.url(f"{name}/README.md"), wait_until="networkidle")
        visitor.page.wait_for_function("document.querySelector('.kv-follow').follow")
        visitor.page.emulate_media(media="print")
        visitor.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        visitor.page.evaluate(TWO_FRAMES)
        heights = (
            "[...document.querySelectorAll('.kv-step')].map(step => step.querySelector('.kv-drawn')?.offsetHeight)"
        )
        assert all(height and height > 30 for height in visitor.page.evaluate(heights))
        visitor.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert visitor.page.locator(".kv-drawn").count() == 0
        assert not [url for url in asked if url.endswith(".frames.svg")]
        assert not visitor.complaints


def test_a_text_is_followed_by_pointer_and_keyboard_and_leaves_a_reader_who_steps_alone(visit):
    page = visit("l2_token_flat/README.md", reduced_motion="reduce")
    page.evaluate("document.querySelector('.kv-follow').scrollIntoView()")
    page.wait_for_function("document.querySelector('.kv-follow').follow.player")
    figure, steps = page.locator(".kv-compact"), page.locator(".kv-step")
    words = figure.locator(".kv-say > span")

    def shows(number: int) -> None:
        page.evaluate(TWO_FRAMES)
        frame = steps.nth(number).get_attribute("data-frame")
        assert figure.get_attribute("data-index") == frame and page.evaluate(NOW) == [frame]

    steps.nth(2).click(position=EDGE)
    shows(2)
    page.keyboard.press("Tab")
    steps.nth(1).locator(".kv-here").focus()
    shows(1)
    assert words.bounding_box()["height"] < 2, "the paragraph says it"
    steps.nth(2).click(position=EDGE)
    before = page.evaluate("scrollY")
    figure.get_by_role("button", name="Step forward").click()
    page.evaluate(TWO_FRAMES)
    assert page.evaluate("scrollY") == before, "a step by hand moves no text"
    assert words.bounding_box()["height"] > 10, "no paragraph says what this frame shows"
