"""Course machinery. The front page: its figures come from commands, and its first task is judged by lesson 0's tests.

Protects the first impression: a figure that was not measured, a verdict that a terminal would not give.
"""

import json
import re

from scripts import ROOT
from scripts.live.page import check
from scripts.pages import beyond, tool_data, tracks
from scripts.pages.ladder import read_report
from scripts.website.browser import visiting

import pytest
import yaml

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from lessons._course.tracks import read_syllabus
from tests.course.site_fixtures import PATIENCE_MS
from tests.course.test_live import needs_python

HERO = (ROOT / "site" / "theme" / "partials" / "hero.html").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
LESSONS = read_lessons(Places.find())


def test_the_first_screen_s_command_is_the_readme_s():
    (shown,) = re.findall(r"<code><span>git.*?</code>", HERO)
    command = re.sub("<.*?>", "", shown)
    clone, make = command.rsplit(" && ", 1)
    assert f"\n{clone}\n{make} " in README


@pytest.mark.nightly
def test_the_first_task_s_example_is_what_the_pocket_model_says():
    (prompt,), told = re.findall("<q>(.*?)</q>", HERO), re.findall("<data>(.*?)</data>", HERO)
    found = tool_data.sampler(prompt)
    best = [f"{word} {found['logits'][token]:.1f}" for token, word in found["words"]]
    assert told == [f"{len(found['logits']):,}", *best[: len(told) - 1]], "write the vocabulary's size and the best"


def numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d,.]*\d|\d", text)


def test_the_first_screen_s_figures_are_the_ladder_s_and_the_lessons():
    speeds = [f"{row['new tokens/s']:,.0f}" for row in read_report().rows]
    (gain,), (facts,) = (re.findall(rf'class="kv-hero__{name}">([^<]*)<', HERO) for name in ("measured", "facts"))
    assert numbers(gain) == [speeds[0], speeds[-1]], "write the ladder's first and last speed into the promise"
    core = read_syllabus(Places.find(), LESSONS).core.of(LESSONS)
    assert numbers(facts) == [str(round(sum(lesson.core_minutes for lesson in core) / 60))], "write the core's hours"


def test_the_website_s_menu_has_every_lesson_in_its_track():
    menu = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)["nav"]
    shown = {
        name: [int(title.split(".")[0]) for page in pages for title in page]
        for part in menu[2:-1]
        for name, pages in part.items()
    }
    assert shown == {track.title: list(track.lessons) for track in read_syllabus(Places.find(), LESSONS).tracks}


def test_what_a_lesson_bought_has_the_ladder_s_figures():
    told = tracks.bought()
    for row in read_report().rows:
        says, speed = told[f"{LESSONS[int(row['lesson'].split()[0])].id}/"], f"{row['new tokens/s']:,.0f}"
        assert "tokens/s" not in says or speed in numbers(says), f"mkdocs.yml: write {speed} into {says!r}"


def test_every_lesson_beyond_the_ladder_is_in_the_second_picture():
    assert [int(gain.number) for gain in beyond.GAINS] == list(range(10, len(LESSONS)))


RIGHT = ("int(logits.argmax())", "return torch.argmax(logits, dim=-1).item()", "logits.max(dim=-1)[1].item()")
WRONG = ("logits.argmax()", "int(logits.abs().argmax())", "int(logits.argmin())", "nothing", "int(logits.argmax(")


def checked(page, line: str) -> str:
    """Check a line in the hero, and return what is said of it."""
    page.locator(".kv-touch input").fill(line)
    page.locator(".kv-touch button").first.click()
    page.locator(".kv-touch.right, .kv-touch.wrong").wait_for()
    return page.locator(".kv-touch output").inner_text()


def test_what_python_cannot_read_is_called_the_reader_s_expression():
    (found,) = check(ROOT, {"lesson": "l0_the_loop", "tasks": [1], "expression": "int(logits.argmax("}, str)
    assert found["result"]["status"] != "done"
    said = found["advice"]["headline"]
    assert "your expression" in said and "line" not in said, "readers typed an expression: they see no file and no line"


@needs_python
def test_the_first_task_is_judged_by_lesson_0_s_own_tests(site_http, browser):
    with visiting(browser, site_http, reduced_motion="reduce") as visitor:
        page, fetched = visitor.page, []
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(site_http.url(), wait_until="networkidle")
        page.evaluate(f"KvLive.engine.seconds = {PATIENCE_MS // 1000}")
        page.locator(".kv-touch input").fill("int(logits.argmax())")
        assert not [url for url in fetched if "/vendor/py" in url or url.endswith(("worker.js", ".zip"))]
        for line in RIGHT:
            assert checked(page, line) and page.locator(".kv-touch.right").count() == 1, line
        for line in WRONG:
            assert checked(page, line) and page.locator(".kv-touch.wrong").count() == 1, line
        assert page.locator(".kv-map li").first.locator(".kv-tick").inner_text() == "1 task"
        assert not visitor.complaints


@needs_python
def test_a_check_whose_python_does_not_arrive_can_be_tried_again(site_http, browser):
    with visiting(browser, site_http, reduced_motion="reduce") as visitor:
        page = visitor.page
        page.set_default_timeout(PATIENCE_MS)
        page.route("**/pyodide.asm.wasm", lambda route: route.abort())
        page.goto(site_http.url())
        assert checked(page, "int(logits.argmax())") and page.locator(".kv-touch.wrong").count() == 1
        page.unroute("**/pyodide.asm.wasm")
        page.locator(".kv-touch").get_by_role("button", name="Try again").click()
        page.locator(".kv-touch.right").wait_for()


def test_the_figures_beside_vllm_are_lesson_9_s():
    rows = json.loads((ROOT / "lessons" / "l9_speed" / "peers.json").read_text(encoding="utf-8"))["rows"]
    speeds = {(row["engine"], row["load"].split()[1]): row["tokens/s"] for row in rows if row["load"][:6] == "decode"}
    wanted = [f"{speeds[engine, count]:.3g}" for engine in ("ours", "vllm") for count in ("1", "8")]
    told = re.findall(r"<b>([\d.]+)</b>", HERO)
    assert list(map(float, told)) == list(map(float, wanted)), f"write {wanted} below the race"


@pytest.mark.nightly
def test_the_map_has_every_lesson_once_and_the_reader_s_progress(visit, site_http):
    page = visit("l2_token_flat/README.md")
    page.get_by_role("button", name="Mark lesson 2 as done").click()
    page.goto(site_http.url())
    places = page.locator(".kv-map li b").all_inner_texts()
    assert sorted(map(int, places)) == [lesson.number for lesson in LESSONS]
    assert page.locator(".kv-map li", has=page.locator(".kv-tick")).count() == 1
    assert not page.locator("article table").count(), "GitHub's table of lessons is not in the page"
    stop = page.locator(".kv-map li", has_text=LESSONS[5].title)
    box = stop.bounding_box()
    needs = stop.locator("small").inner_text().partition("needs")[2]
    assert box and numbers(needs) == [str(need) for need in LESSONS[5].needs]
    stop.click(position={"x": box["width"] * 0.6, "y": box["height"] - 6})
    page.wait_for_url("**/l5_scheduler/")
