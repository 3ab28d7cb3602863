"""Course machinery. A reader's progress, kept in the browser: lessons done, guesses, where to go on.

Protects readers from losing their ticks or having an answer marked wrong on the site.
"""

import json
import re

from scripts import ROOT
from scripts.website.browser import visiting

import pytest
import yaml

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from lessons._course.progress import Entry

LESSONS = read_lessons(Places.find())
PAGES = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)["extra"]["pages"]


def resume(page) -> str:
    return page.locator("[data-resume]").get_attribute("href")


def test_a_lesson_marked_as_done_is_ticked_everywhere_and_the_next_one_resumed(visit, site_http, browser):
    page = visit()
    assert "l0_" in resume(page) and page.locator(".kv-tick").count() == 0
    assert page.locator(".kv-kept input").bounding_box()["width"] <= 1, "no browser's own Choose File"
    assert not page.get_by_role("button", name="Forget").is_visible(), "nothing is there to forget"
    page.goto(site_http.url("l2_token_flat/README.md"))
    page.get_by_role("button", name="Mark lesson 2 as done").click()
    assert page.locator(".md-nav--primary .kv-tick:visible").count() == 1
    page.goto(site_http.url())
    assert page.locator(".kv-map li", has_text="Token-flat").locator(".kv-tick").get_attribute("aria-label")
    assert "l3_" in resume(page)
    page.locator("[data-resume]").click()
    page.wait_for_url("**/l3_block_tensor/")
    page.goto(site_http.url())
    page.get_by_role("button", name="Forget").click()
    assert "l0_" in resume(page) and page.locator(".kv-tick").count() == 0


def test_the_course_s_own_record_is_imported(tmp_path, visit):
    entries = {
        LESSONS[0].id: Entry(passed="2026-11-22", tasks_done=[1, 2]),
        LESSONS[1].id: Entry(first_passed="2026-11-20"),
        LESSONS[2].id: Entry(tasks_done=[1, 2, 3]),
    }
    record = tmp_path / "progress.json"
    text = json.dumps({"version": 1, "lessons": {name: vars(entry) for name, entry in entries.items()}})
    record.write_text(text, encoding="utf-8")
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]", encoding="utf-8")
    page = visit()
    page.set_input_files("#kv-import", wrong)
    page.locator(".kv-kept [role=status]:not(:empty)").wait_for()
    assert not page.locator(".kv-tick").count()
    page.set_input_files("#kv-import", record)
    page.locator(".kv-kept__sum:not(:empty)").wait_for()
    assert re.findall(r"\d+", page.locator(".kv-kept__sum").inner_text()) == ["2", str(len(LESSONS))]
    assert page.locator(".kv-map li").nth(2).locator(".kv-tick").inner_text().startswith("3")
    assert "l2_" in resume(page)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.id)
def test_every_lesson_has_a_guess_to_give(lesson):
    guess = PAGES[f"{lesson.id}/"]["guess"]
    if "options" in guess:
        assert 0 <= int(guess["right"]) < len(guess["options"]) and len(guess["options"]) > 1
    else:
        assert float(guess["number"]) >= 0 and guess["unit"]


@pytest.mark.parametrize("given", ["right", "wrong"])
def test_a_choice_opens_the_answer_and_is_remembered(given, site_http, browser):
    with visiting(browser, site_http) as visitor:
        page = visitor.page
        guess = PAGES["l5_scheduler/"]["guess"]
        chosen = guess["options"][int(guess["right"]) - (given == "wrong")]
        page.goto(site_http.url("l5_scheduler/README.md"))
        answer = page.locator(".kv-guesses + details")
        assert answer.get_attribute("open") is None
        page.get_by_role("button", name=chosen, exact=True).click()
        verdict = page.locator(".kv-verdict")
        said = verdict.inner_text()
        assert chosen in said and verdict.get_attribute("data-right") == str(given == "right").lower()
        assert answer.get_attribute("open") is not None
        page.reload()
        assert page.locator(".kv-verdict").inner_text() == said
        assert not visitor.complaints


@pytest.mark.parametrize("given, right", [("14000", True), ("200", False)])
def test_a_number_near_the_answer_is_right(given, right, visit):
    page = visit("l0_the_loop/README.md")
    page.locator("#kv-guessed").fill(given)
    page.get_by_role("button", name="Guess", exact=True).click()
    assert page.locator(".kv-verdict").get_attribute("data-right") == str(right).lower()
