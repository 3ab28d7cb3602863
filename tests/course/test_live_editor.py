"""Course machinery. The editor of an exercise: line numbers, the line that failed, the keyboard, and no CodeMirror.

Protects readers from a verdict about line 69 in a text without numbers, a keyboard that cannot leave, and a phone that
zooms into the text.
"""

from scripts.website.browser import PHONE, visiting

import pytest

from tests.course.looks import AXE, RUN_AXE
from tests.course.site_fixtures import PATIENCE_MS
from tests.course.test_live import needs_python, reference, write

SOURCE = "l2_token_flat/README.md"
EDITOR = "codemirror/codemirror.js"


@pytest.fixture
def opened_editor(site_http, browser):
    """Return a function that opens lesson 2's first exercise."""
    with visiting(browser, site_http, width=PHONE, reduced_motion="reduce") as visitor:
        seen: list[str] = []
        visitor.page.on("request", lambda request: seen.append(request.url))

        def open_it():
            page = visitor.page
            page.set_default_timeout(PATIENCE_MS)
            page.goto(site_http.url(SOURCE), wait_until="networkidle")
            assert not [url for url in seen if EDITOR in url], "an editor is loaded with an exercise only"
            box = page.locator("#exercise-2-3")
            box.get_by_role("button", name="Write tasks 2 and 3 here").click()
            return page, box

        open_it.page = visitor.page
        yield open_it
        assert not [error for error in visitor.complaints if "ERR_FAILED" not in error]


@needs_python
def test_the_line_of_a_verdict_is_marked_beside_its_number(opened_editor):
    page, box = opened_editor()
    box.locator(".cm-editor").wait_for()
    _, source = reference("l2_token_flat", 2)
    wrong = source.replace("cut = len(self.free_blocks) - n", "cut = len(self.free_blocks) - n / 0")
    write(box, wrong)
    box.get_by_role("textbox").press("Control+Enter")
    line = 1 + wrong[: wrong.index("n / 0")].count("\n")
    box.get_by_role("button", name=f"Line {line}").click()
    box.locator(".kv-live-failed").wait_for()  # an editor renders only the lines near those in sight
    assert "n / 0" in box.locator(".kv-live-failed").inner_text()
    assert box.evaluate("box => box.exercise.editor.line") == line
    assert str(line) in box.locator(".cm-lineNumbers").inner_text().split()
    assert box.locator(".cm-content .tok-keyword").count() > 3
    sideways = box.locator(".cm-scroller").evaluate("room => room.scrollWidth - room.clientWidth")
    assert sideways <= 1, "on a phone a long line goes on below"
    page.evaluate(AXE.read_text(encoding="utf-8"))
    assert not page.evaluate(RUN_AXE, {"place": "#exercise-2-3"})
    page.keyboard.type("#")
    assert not box.locator(".kv-live-failed").count(), "a change takes the mark away"


@needs_python
def test_keys_indent_and_leave(opened_editor):
    page, box = opened_editor()
    box.locator(".cm-editor").wait_for()
    write(box, "")
    box.get_by_role("textbox").focus()
    page.keyboard.type("def free(self):")
    page.keyboard.press("Enter")
    page.keyboard.type("return 1")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert box.evaluate("box => box.exercise.text") in (
        "def free(self):\n    return 1\n        ",
        "def free(self):\n    return 1\n    ",
    )
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Check", "Escape, then Tab leaves the editor"
    size = box.locator(".cm-content").evaluate("node => parseFloat(getComputedStyle(node).fontSize)")
    assert size >= 16, "below 16 pixels iOS zooms"


@needs_python
def test_without_codemirror_the_text_area_stays(opened_editor):
    opened_editor.page.route(f"**/{EDITOR}", lambda route: route.abort())
    page, box = opened_editor()
    area = box.locator("textarea")
    area.wait_for()
    page.wait_for_load_state("networkidle")
    assert area.evaluate("node => parseFloat(getComputedStyle(node).fontSize)") >= 16
    write(box, reference("l2_token_flat", 2)[1])
    area.press("Control+Enter")
    box.locator(".kv-live-verdict.good").wait_for()
