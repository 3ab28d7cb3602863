"""Course machinery. The front page: its figures come from commands, its race runs, nothing on it jumps.

Protects the first impression: a figure that nobody measured, a race that stalls or a page that moves while it is read.
"""

import json
import re

from scripts import ROOT
from scripts.pages import beyond, chats, race, tracks
from scripts.pages.ladder import read_report
from scripts.website import live
from scripts.website.browser import DESKTOP, PHONE, visiting

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from tests.course.test_live import PATIENCE_MS, needs_python

HERO = (ROOT / "site" / "theme" / "partials" / "hero.html").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
LESSONS = read_lessons(Places.find())
LONGEST_ON_A_PHONE = 6500  # pixels
MOST_SHIFT = 0.02  # of layout, as browsers count it


def test_the_first_screen_s_command_is_the_readme_s():
    (shown,) = re.findall(r"<code><span>git.*?</code>", HERO)
    command = re.sub("<.*?>", "", shown)
    clone, make = command.rsplit(" && ", 1)
    assert f"\n{clone}\n{make} " in README


def numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d,.]*\d|\d", text)


def test_the_first_screen_s_figures_are_the_ladder_s_and_the_lessons():
    speeds = [f"{row['new tokens/s']:,.0f}" for row in read_report().rows]
    (title,), (facts,) = (re.findall(rf'class="kv-hero__{name}">([^<]*)<', HERO) for name in ("title", "facts"))
    assert numbers(title) == [speeds[0], speeds[-1]], "write the ladder's first and last speed into the title"
    assert numbers(facts) == [str(round(sum(lesson.minutes for lesson in LESSONS) / 60))], "write the lessons' hours"


def test_what_a_lesson_bought_has_the_ladder_s_figures():
    told = tracks.bought()
    for row in read_report().rows:
        says, speed = told[f"{LESSONS[int(row['lesson'].split()[0])].id}/"], f"{row['new tokens/s']:,.0f}"
        assert "tokens/s" not in says or speed in numbers(says), f"mkdocs.yml: write {speed} into {says!r}"


def test_every_lesson_beyond_the_ladder_is_in_the_second_picture():
    assert [int(gain.number) for gain in beyond.GAINS] == list(range(10, len(LESSONS)))


HURRY = "() => { window.KV_RACE.pace = 40; }"
FULL = """() => [...document.querySelectorAll('.kv-lane i')]
    .map(i => Number(i.style.getPropertyValue('--full') || 1))"""


def test_the_race_rests_where_it_tells_the_story_and_runs_in_its_time(site_http, browser):
    with visiting(browser, site_http, reduced_motion="reduce") as visitor:
        page = visitor.page
        page.goto(site_http.url())
        lanes, button = page.locator(".kv-lane"), page.locator(".kv-race button")
        before = lanes.all_inner_texts()
        clocks = [float(told.removesuffix(" s")) for told in page.locator(".kv-lane output").all_inner_texts()]
        ends = [lane["seconds"] for lane in race.read()["lanes"]]
        assert clocks == [pytest.approx(min(end, race.REST), abs=0.051) for end in ends], "clocks and squares agree"
        at_rest = page.evaluate(FULL)
        assert len(before) == len(race.RUNNERS)
        assert set(at_rest[48:]) == {1} and 2 <= sum(at_rest[:24]) < 4, "three lanes done, lesson 0 on its third square"
        button.click()
        page.wait_for_function("() => document.querySelector('.kv-lane[data-lesson=\"9\"]').classList.contains('done')")
        full = page.evaluate(FULL)
        assert min(full[-24:]) == 1 and max(full[12:24]) == 0, "lesson 9 is done while lesson 0 has hardly begun"
        page.evaluate(HURRY)
        page.locator(".kv-race:not(.running)").wait_for()
        assert page.evaluate(FULL) == at_rest and lanes.all_inner_texts() == before
        assert not visitor.complaints


def test_the_race_can_be_stopped(site_http, browser):
    with visiting(browser, site_http) as visitor:
        visitor.page.goto(site_http.url())
        button = visitor.page.locator(".kv-race button")
        said = button.inner_text()
        button.click()
        visitor.page.locator(".kv-race.running").wait_for()
        button.click()
        visitor.page.locator(".kv-race:not(.running)").wait_for()
        assert button.inner_text() == said


def test_the_race_runs_by_itself_once_in_view(site_http, browser):
    with visiting(browser, site_http, width=1440) as visitor:
        visitor.page.goto(site_http.url())
        visitor.page.mouse.wheel(0, 300)
        visitor.page.locator(".kv-race.running").wait_for()
        visitor.page.locator(".kv-race button").click()
        visitor.page.wait_for_timeout(1800)
        assert not visitor.page.locator(".kv-race.running").count(), "once stopped, it stays so"


def test_the_chats_are_lesson_8_s_and_the_counter_is_the_trace_s(site_http, browser):
    found, size = chats.read_chats()
    with visiting(browser, site_http, java_script_enabled=False) as visitor:
        visitor.page.goto(site_http.url())
        figure = visitor.page.locator(".kv-chats")
        sums = f"{sum(chat.found for chat in found)} of {sum(chat.tokens for chat in found)} "
        assert sums in " ".join(figure.inner_text().split())
        dots = figure.locator("circle[data-at]:not(.disc)").count()
        assert dots * size == sum(chat.found for chat in found), "a dot is a block that was found"
        visitor.page.goto(site_http.base + "l8_radix/chats.html")
        assert visitor.page.locator(".kv-chats svg").is_visible() and not visitor.complaints


RIGHT = ("int(logits.argmax())", "return torch.argmax(logits, dim=-1).item()", "logits.max(dim=-1)[1].item()")
WRONG = ("logits.argmax()", "int(logits.abs().argmax())", "int(logits.argmin())", "nothing", "int(logits.argmax(")


def checked(page, line: str) -> str:
    """Check a line in the hero, and return what is said of it."""
    page.locator(".kv-touch input").fill(line)
    page.locator(".kv-touch button").first.click()
    page.locator(".kv-touch.right, .kv-touch.wrong").wait_for()
    return page.locator(".kv-touch output").inner_text()


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


@needs_python
@pytest.mark.parametrize("width", [1440, PHONE])
def test_the_lab_and_the_model_are_in_the_first_two_screens(width, site_http, browser):
    with visiting(browser, site_http, width=width) as visitor:
        page = visitor.page
        page.goto(site_http.url(), wait_until="networkidle")
        two_screens = 2 * page.viewport_size["height"]
        for name in ("Run the model here", "Try chats of your own"):
            box = page.get_by_role("button", name=name).bounding_box()
            assert box and box["y"] + box["height"] <= two_screens, name
        if width > PHONE:
            lab = page.locator(".kv-lab .kv-live-go").bounding_box()
            assert lab and lab["y"] + lab["height"] <= two_screens


@needs_python
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_what_the_first_screens_start_is_in_sight(width, site_http, browser):
    from playwright.sync_api import expect  # it is there if the browser is

    with visiting(browser, site_http, width=width) as visitor:
        page = visitor.page
        page.set_default_timeout(PATIENCE_MS)
        page.goto(site_http.url())
        page.get_by_role("button", name="Run the model here").click()
        page.locator(".kv-model:not([aria-busy]) .kv-model-text strong").wait_for()
        page.locator(".kv-model + .kv-figure svg.kv-art").wait_for()
        for part in (page.locator(".kv-model-text"), page.get_by_role("button", name="Continue it")):
            expect(part).to_be_in_viewport()  # the pool below the answer must not push it out
        page.get_by_role("button", name="Try chats of your own").click()
        page.locator(".kv-figure[data-trace=lab-tree] svg.kv-art").wait_for()
        expect(page.locator(".kv-figure[data-trace=lab-tree] .kv-head")).to_be_in_viewport()
        assert not visitor.complaints


@pytest.mark.nightly  # it compresses all that is loaded
@needs_python
def test_the_first_task_says_what_a_check_loads():
    (told,) = re.findall(r"\((\d+) MB, once\)", HERO)
    sizes = live.sizes()
    needed = sizes["lab"] + sizes["check"]
    assert abs(int(told) - needed) < 1, f"write {needed:.0f} MB into the first task"


def test_the_figures_beside_vllm_are_lesson_9_s():
    rows = json.loads((ROOT / "lessons" / "l9_speed" / "peers.json").read_text(encoding="utf-8"))["rows"]
    speeds = {(row["engine"], row["load"].split()[1]): row["tokens/s"] for row in rows if row["load"][:6] == "decode"}
    wanted = [f"{speeds[engine, count]:.3g}" for engine in ("ours", "vllm") for count in ("1", "8")]
    told = re.findall(r"<b>([\d.]+)</b>", HERO)
    assert list(map(float, told)) == list(map(float, wanted)), f"write {wanted} below the race"


def test_the_first_screen_has_the_page_s_one_title(site_http, browser):
    with visiting(browser, site_http) as visitor:
        visitor.page.goto(site_http.url())
        assert visitor.page.locator("h1:visible").count() == 1


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_nothing_jumps(width, site_http, browser):
    watch = """window.shift = 0; new PerformanceObserver(list => list.getEntries().forEach(entry => {
        if (!entry.hadRecentInput) window.shift += entry.value; })).observe({type: "layout-shift", buffered: true});"""
    with visiting(browser, site_http, width=width) as visitor:
        visitor.page.add_init_script(watch)
        visitor.page.goto(site_http.url(), wait_until="networkidle")
        visitor.page.mouse.wheel(0, 4000)
        visitor.page.wait_for_timeout(300)
        assert visitor.page.evaluate("shift") <= MOST_SHIFT


def test_without_scripts_the_pictures_are_there_and_say_what_a_script_would_do(site_http, browser):
    with visiting(browser, site_http, java_script_enabled=False) as visitor:
        visitor.page.goto(site_http.url())
        assert visitor.page.locator(".kv-lane").count() == len(race.RUNNERS)
        assert not visitor.page.locator(".kv-race button").is_visible()
        for figure in (".kv-race", ".kv-chats"):
            assert visitor.page.locator(f"{figure} noscript").inner_text().strip()


@pytest.mark.nightly
def test_the_map_has_every_lesson_once_and_the_reader_s_progress(site_http, browser):
    with visiting(browser, site_http) as visitor:
        visitor.page.goto(site_http.url("l2_token_flat/README.md"))
        visitor.page.get_by_role("button", name="Mark lesson 2 as done").click()
        visitor.page.goto(site_http.url())
        places = visitor.page.locator(".kv-map li b").all_inner_texts()
        assert sorted(map(int, places)) == [lesson.number for lesson in LESSONS]
        assert visitor.page.locator(".kv-map li", has=visitor.page.locator(".kv-tick")).count() == 1
        assert not visitor.page.locator("article table").count(), "GitHub's table of lessons is not in the page"
        stop = visitor.page.locator(".kv-map li", has_text=LESSONS[5].title)
        box = stop.bounding_box()
        assert box and numbers(stop.locator("small").inner_text())[1:] == [str(need) for need in LESSONS[5].needs]
        stop.click(position={"x": box["width"] * 0.6, "y": box["height"] - 6})
        visitor.page.wait_for_url("**/l5_scheduler/")


def test_on_a_phone_the_page_is_short_and_everything_a_tap_away(site_http, browser):
    with visiting(browser, site_http, width=PHONE, has_touch=True, reduced_motion="reduce") as visitor:
        page = visitor.page
        page.goto(site_http.url(), wait_until="networkidle")
        assert page.evaluate("document.documentElement.scrollHeight") <= LONGEST_ON_A_PHONE
        bought = page.locator(".kv-map li", has_text=LESSONS[5].title).locator("p")
        assert not bought.is_visible()
        page.get_by_label("Show what each needs").tap()
        assert bought.is_visible()
        need = page.get_by_role("button", name="What you need")
        folded = page.locator(".kv-folded").count()
        assert need.get_attribute("aria-expanded") == "false" and folded
        need.tap()
        assert need.get_attribute("aria-expanded") == "true" and page.locator(".kv-folded").count() < folded
        page.goto(site_http.url("README.md#a-check-turns-green"))
        page.reload()
        assert page.locator(".turns-red").is_visible(), "an address with its anchor opens a section"
        small = page.locator(".kv-tree text").evaluate_all(
            "texts => texts.map(text => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)"
        )
        assert min(small) >= 12, "the tree's words can be read"
        assert not visitor.complaints
