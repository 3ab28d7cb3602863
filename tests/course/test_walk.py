"""Course machinery. A stranger's way through the site works from its first step to its last.

Protects the whole: each part of the site has tests of its own; here one reader uses one after another.
"""

from scripts.website.browser import PHONE, visiting

import pytest

from tests.course.test_live import PATIENCE_MS, needs_python

WRONG, RIGHT = "int(logits.argmin())", "int(logits.argmax())"  # what a reader may write for lesson 0's first task
AT_ITS_END = "node => new Set(node.querySelector('.kv-number').innerText.split(' / ')).size === 1"
WRITE = """(box, [was, line]) => {
    const lines = box.exercise.text.split("\\n");
    const at = lines.findIndex(text => text.trim().startsWith(was));
    lines[at] = "    " + line;
    box.exercise.text = lines.join("\\n");
}"""


@needs_python
@pytest.mark.parametrize("width", [1440, PHONE])
def test_a_stranger_comes_from_the_first_screen_to_a_lesson_that_is_done(width, site_http, browser):
    with visiting(browser, site_http, width=width, has_touch=width == PHONE) as visitor:
        visitor.page.set_default_timeout(PATIENCE_MS)
        front_page(visitor.page, site_http)
        first_lesson(visitor.page, site_http)
        assert not visitor.complaints, "\n".join(visitor.complaints)


def front_page(page, site) -> None:
    """Look at the race and the chats, write the first line of code, ask the model, and let a chat of one's own in."""
    page.goto(site.url(), wait_until="networkidle")
    page.locator(".kv-race").evaluate("node => node.scrollIntoView({behavior: 'instant'})")  # the chats begin in sight
    page.locator(".kv-chats__say", has_text="A square is").wait_for()
    touch, model, lab = (page.locator(name) for name in (".kv-touch", ".kv-model", "#lab-tree"))
    for line, verdict in ((WRONG, "wrong"), (RIGHT, "right")):
        touch.locator("input").fill(line)
        touch.get_by_role("button", name="Check").click()
        page.locator(f".kv-touch.{verdict}").wait_for()
    model.get_by_label("Prompt").first.fill("What is the capital of Japan?")
    model.locator(".kv-live-go").click()
    page.locator(".kv-model:not([aria-busy]) .kv-model-text strong").wait_for()
    page.locator(".kv-model + .kv-figure svg.kv-art").wait_for()
    page.get_by_role("button", name="Try chats of your own").click()
    page.locator(".kv-figure[data-trace=lab-tree]").wait_for()
    lab.locator(".kv-live-prompt input").fill("What is the capital of Peru?")
    lab.get_by_role("button", name="Arrive").click()
    page.locator("#lab-tree:not([aria-busy])").wait_for()


def first_lesson(page, site) -> None:
    """Watch lesson 0's player, write its exercise wrongly and then rightly, and mark the lesson as done."""
    page.goto(site.url("l0_the_loop/README.md"), wait_until="networkidle")
    page.evaluate("KvPlayer.pace = 0.02")
    figure, box = page.locator(".kv-figure").first, page.locator("#exercise-1-4")
    figure.get_by_role("button", name="Play").click()
    page.wait_for_function(AT_ITS_END, arg=figure.element_handle())
    box.locator(".kv-live-go").click()
    box.locator(".cm-content").wait_for()
    for was, line, kind in (("raise NotImplementedError", WRONG, "bad"), ("return", RIGHT, "open")):
        box.evaluate(WRITE, [was, f"return {line}"])
        box.get_by_role("button", name="Check").click()
        box.locator(f".kv-live-verdict.{kind}").wait_for()
    page.get_by_role("button", name="Mark lesson 0 as done").click()
    page.goto(site.url(), wait_until="networkidle")
    assert page.locator(".kv-map .kv-tick").count()
