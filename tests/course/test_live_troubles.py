"""Course machinery. Labs, exercises and the model in the page when something goes wrong, and their links.

Protects readers from a download that hangs without a word, an event that is refused again and again, an empty frame,
a question without an answer, and an address that breaks a lab.
"""

import re

from scripts import ROOT
from scripts.live.labs import LABS
from scripts.live.page import lab as lab_answer
from scripts.website.browser import visiting

import pytest

from tests.course.site_fixtures import PATIENCE_MS
from tests.course.test_live import each_lab, needs_python, opened, reference, write

LOST = "**/pyodide.asm.wasm"
START = {  # what starts a download, and where it tells of it
    "lab": ("l2_token_flat/README.md", "#lab-pool", "Try it with requests of your own"),
    "exercise": ("l2_token_flat/README.md", "#exercise-2-3", "Write tasks 2 and 3 here"),
    "model": ("README.md", "#model-pocket", "Run the model here"),
}


def is_quiet(visitor) -> bool:
    """Whether the console has nothing but the aborted download."""
    return (
        not [error for error in visitor.errors if not re.search("ERR_FAILED|Failed to fetch", error)]
        and not visitor.outside
    )


@pytest.fixture(params=START)
def started(request, site_http, browser):
    """Yield a function that starts a download, and returns the visitor and the box that tells of it."""
    source, place, words = START[request.param]
    with visiting(browser, site_http, reduced_motion="reduce") as visitor:

        def start(silence: int = 60):
            visitor.page.set_default_timeout(PATIENCE_MS)
            visitor.page.goto(site_http.url(source))
            visitor.page.evaluate(f"KvLive.engine.silence = {silence}")
            box = visitor.page.locator(place)
            box.get_by_role("button", name=words).click()
            if "exercise" in place:
                box.get_by_role("button", name="Check").click()
            return visitor, box

        start.page = visitor.page
        yield start


@needs_python
def test_an_aborted_download_is_told_and_can_be_tried_again(started):
    started.page.route(LOST, lambda route: route.abort())
    visitor, box = started()
    again = box.get_by_role("button", name="Try again")
    again.wait_for()
    assert "pyodide.asm.wasm" in box.inner_text()
    assert not box.locator(".kv-live-meter").is_visible()
    started.page.unroute(LOST)
    again.click()
    sign = {"#exercise-2-3": ".kv-live-verdict.open", "#model-pocket": ".kv-model-text strong", "#lab-pool": "dl dd"}
    started.page.locator(f"#{box.get_attribute('id')} {sign['#' + box.get_attribute('id')]}").first.wait_for()
    assert not box.get_by_role("button", name="Try again").count()
    assert is_quiet(visitor), visitor.complaints


@needs_python
def test_a_refused_event_is_not_kept(visit):
    page = visit("l5_scheduler/README.md", reduced_motion="reduce")
    opened(page, "batch")
    box = page.locator("#lab-batch")
    box.get_by_text("Settings and more").click()
    box.get_by_role("button", name="Start over").click()
    page.wait_for_function("() => !location.search.includes('%2B')")
    box.get_by_label("Prompt tokens, answer tokens").fill("Hello there")
    box.get_by_role("button", name="Arrive").click()
    said = box.locator(".kv-live-say", has_text="give prompt tokens")
    said.wait_for()
    assert page.evaluate("document.querySelector('.kv-lab').lab.events") == []
    box.get_by_label("Prompt tokens, answer tokens").fill("5,2")
    box.get_by_role("button", name="Arrive").click()
    page.wait_for_function("() => location.search.includes('%2BA%3D5%2C2')")
    assert not said.count(), "the refusal must not come back at the next step"


@needs_python
def test_code_that_cannot_run_in_the_lab_is_told_and_leaves_the_recorded_story(visit):
    _, source = reference("l2_token_flat", 2)
    broken = source.replace("        cut = len(self.free_blocks) - n\n", "        cut = len(self.free_blocks) - (n\n")
    page = visit("l2_token_flat/README.md", reduced_motion="reduce")
    said = page.locator("article .kv-figure[data-trace] .kv-say").last
    story = said.inner_text()
    box = page.locator("#exercise-2-3")
    box.get_by_role("button", name="Write tasks 2 and 3 here").click()
    write(box, broken)
    box.get_by_role("button", name="Check").click()
    box.get_by_role("button", name="Watch it in the lab").click()
    told = page.locator("#lab-pool .kv-live-verdict.bad")
    told.wait_for()
    assert re.search(r"allocator\.py:\d+: SyntaxError: ", told.inner_text())
    assert said.inner_text() == story, "no empty frame takes its place"
    write(box, source.replace("del self.free_blocks[cut:]", "pass"))
    box.get_by_role("button", name="Check").click()
    box.locator(".kv-live-verdict.bad", has_text="Task").wait_for()
    box.get_by_role("button", name="Watch it in the lab").click()
    page.locator("#lab-pool .kv-live-verdict.bad a").wait_for()
    number = page.locator(".kv-figure.kv-live .kv-number").inner_text().split(" / ")
    assert number[0] == number[1], "it opens at the frame that breaks the rule"


def test_why_own_code_cannot_run_is_one_sentence():
    for code, said in (("def (", "allocator.py:1: SyntaxError: "), ("import no_such", "ModuleNotFoundError: ")):
        found = lab_answer(ROOT, {"lab": "pool", "do": "+A=Hello", "mine": {"mini_engine/kv/allocator.py": code}}, None)
        assert said in found["stopped"] and "\n" not in found["stopped"]


@each_lab
def test_a_lab_opens_on_a_frame_in_which_blocks_are_held(lab):
    for preset in lab.presets:
        played = lab.play(dict(preset.settings), preset.do)
        assert played.held_in(played.frames[played.fullest]) > 0, preset.question


EVIL = "?lab=pool&blocks=1e9&size=<img src=x onerror=alert(1)>&seed=99999999&do=" + "%2BA%3D<b>hi</b>%3B" * 300


@needs_python
def test_what_an_address_says_is_bounded(site_http, browser):
    with visiting(browser, site_http, reduced_motion="reduce") as visitor:
        page = visitor.page
        page.goto(site_http.url("l2_token_flat/README.md") + EVIL)
        lab = page.evaluate(
            "(({settings, events, seed}) => ({settings, events, seed}))(document.querySelector('.kv-lab').lab)"
        )
        assert lab["settings"] == {knob.name: knob.default for knob in LABS["pool"].knobs} and lab["seed"] == ""
        assert len(lab["events"]) == 200 and max(map(len, lab["events"])) <= 160
        page.set_default_timeout(PATIENCE_MS)
        page.locator("#lab-pool .kv-live-go").click()
        page.locator(
            ".kv-lab:not([aria-busy]) dl dd, .kv-lab:not([aria-busy]) .kv-live-say:not(:empty)"
        ).first.wait_for()
        assert not page.locator("article img[src=x], .kv-figure b").count()
        assert not visitor.complaints
