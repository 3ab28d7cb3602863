"""Course machinery. Labs and exercises that run in the page: the same code, the same states, the same judgements.

Protects readers who solve tasks on the website from states or verdicts that the terminal would not give. They need
Pyodide, which `python -m scripts.website.live` fetches; without it, the tests that need it are skipped.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.live.labs import LABS
from scripts.live.labs.events import parse
from scripts.live.labs.lab import Lab
from scripts.website import live
from scripts.website.browser import Site, served, visiting
from scripts.website.live_links import exercises
from scripts.website.player_links import place_of

import pytest

from lessons._course.catalog import read_lesson, read_lessons
from lessons._course.places import Places
from mini_engine.base.errors import UserError
from tests.course.looks import EVERY_LOOK, REPOSITORY, looked_over
from tests.course.site_fixtures import PATIENCE_MS

SEEDS = range(12)
PAGES = {"l2_token_flat": "pool", "l3_block_tensor": "table", "l5_scheduler": "batch", "l8_radix": "tree"}
TASKS = {lesson.id: exercises(lesson.page.read_text(encoding="utf-8")) for lesson in read_lessons(Places.find())}
WRITTEN = [page for page, groups in TASKS.items() if groups]  # lessons with tasks to write in the page
needs_python = pytest.mark.skipif(not live.is_complete(), reason="needs Pyodide: python -m scripts.website.live")
each_lab = pytest.mark.parametrize("lab", LABS.values(), ids=lambda lab: lab.name)

ASK = """async ([kind, question]) => {
    try { return await KvLive.engine.ask(kind, question); } catch (error) { return {failed: error.message}; }
}"""


def told(lab: type[Lab], settings: dict[str, Any], do: str) -> list[dict[str, Any]]:
    """Return the frames as a page gets them."""
    return json.loads(json.dumps(lab.play(settings, do).frames))


# The labs, in this Python


@each_lab
def test_each_preset_plays_to_its_end(lab):
    for preset in lab.presets:
        says = [frame["say"] for frame in told(lab, dict(preset.settings), preset.do)]
        assert len(says) > 1 and not any("code stopped" in say for say in says), f"{preset.question}: {says[-1]}"
        assert preset.question.endswith("?")


@each_lab
def test_in_no_frame_is_a_block_lost_or_held_twice(lab):
    for seed in SEEDS:
        settings, do = lab.scenario(seed)
        for index, frame in enumerate(told(lab, settings, do)):
            assert "code stopped" not in frame["say"], f"seed {seed}, frame {index}: {frame['say']}"
            assert "broken" not in frame, f"seed {seed}, frame {index}: the course's code breaks {frame['broken']}"
            if lab.name in ("pool", "table"):
                held = [block for each in frame.get("requests", frame.get("tables")) for block in each["blocks"]]
                first = 0 if lab.name == "pool" else 1  # the null block
                everything = sorted([*held, *frame["free"]])
                assert everything == list(range(first, settings["blocks"])), f"seed {seed}, frame {index}"
            elif lab.name == "tree":
                assert sum(frame["sums"].values()) == settings["blocks"], f"seed {seed}, frame {index}"
            elif lab.name == "batch":
                assert sum(frame["held"].values()) <= settings["blocks"], f"seed {seed}, frame {index}"


def test_the_blocks_that_a_tree_lab_says_are_stored_are_new_in_its_tree():
    frames = told(LABS["tree"], {"size": 2, "answer": 1}, "+A=once upon a time;*;+B=once upon a time there was;*")
    trees = [{block for node in frame["nodes"] for block in node["blocks"]} for frame in frames]
    for frame, tree, before in zip(frames[1:], trees[1:], trees, strict=False):
        if frame["code"].endswith(".store"):
            assert set(frame["marked"]) == tree - before, frame["say"]


@each_lab
def test_every_frame_of_a_lab_names_a_function_that_its_page_links_to(lab):
    plays = [(dict(preset.settings), preset.do) for preset in lab.presets] + [({}, "")]
    example = [({}, f"+A={lab.example}")] if lab.prompt else []
    named = set()
    for settings, do in [*plays, *example, *map(lab.scenario, SEEDS)]:
        for frame in told(lab, settings, do):
            assert frame.get("code") in lab.code, f"{frame.get('code')!r} made: {frame['say']}"
            named.add(frame["code"])
    assert named == set(lab.code), f"no frame of the scenarios names {set(lab.code) - named}"
    for code in lab.code:
        place_of(code)


@pytest.mark.parametrize("text", ["A", "+G=too many names", "+A=", "?", "+A=" + "long " * 60, ";".join(["."] * 300)])
def test_what_is_no_event_is_refused_in_one_sentence(text):
    with pytest.raises(UserError) as refused:
        parse(text)
    assert "\n" not in str(refused.value)


# What the site is made of


@needs_python
@pytest.mark.parametrize("name", ["course.zip", "tests.zip"])
def test_an_archive_has_the_repository_s_files_as_they_are(name, site_folders):
    with zipfile.ZipFile(site_folders["http"] / "assets" / "live" / "vendor" / name) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    files = live.course_files() if name == "course.zip" else live.check_files()
    assert packed == {path.relative_to(ROOT).as_posix(): live.text_of(path) for path in files}


def test_a_page_without_a_server_or_without_python_says_so_in_a_sentence(site_file, site_folders, tmp_path, browser):
    with visiting(browser, site_file) as visitor:
        visitor.page.goto(site_file.url("l2_token_flat/README.md"))
        assert visitor.page.locator(".kv-lab").inner_text().strip()
        assert visitor.page.locator(".kv-lab button").is_disabled()
        assert not visitor.complaints
    bare = shutil.copytree(site_folders["http"], tmp_path / "bare")
    shutil.rmtree(bare / "assets" / "live" / "vendor", ignore_errors=True)
    page = bare / "l2_token_flat" / "index.html"
    text = re.sub(r"&quot;sizes&quot;: \{.*?\}", "&quot;sizes&quot;: {}", page.read_text(encoding="utf-8"))
    page.write_text(text, encoding="utf-8")
    with served(bare) as base, visiting(browser, Site(bare, base, is_file=False)) as visitor:
        visitor.page.goto(base + "l2_token_flat/")
        assert visitor.page.locator(".kv-lab").inner_text().strip()
        assert visitor.page.locator(".kv-exercise button").first.is_disabled()
        assert not visitor.complaints


@pytest.mark.parametrize("source", ["README.md", "l2_token_flat/README.md"])
def test_without_scripts_a_page_says_what_would_be_there_and_links_to_something_readable(source, site_http, browser):
    with visiting(browser, site_http, java_script_enabled=False) as visitor:
        page = visitor.page
        page.goto(site_http.url(source))
        boxes = page.locator(".kv-lab, .kv-exercise, .kv-model").all()
        for box in boxes:
            assert box.inner_text().strip()
            assert "/blob/main/" in (found := box.locator("a").first.get_attribute("href")) or found == "#your-tasks"
        assert len(boxes) >= 2
        for player in page.locator("a.kv-player").all():
            assert player.locator("img").is_visible()
            assert player.inner_text().strip()
            assert player.get_attribute("href").endswith(".svg")


# In the page


class Python:
    """The Python of an open page."""

    def __init__(self, visitor) -> None:
        self.visitor, self.page = visitor, visitor.page

    def ask(self, kind: str, **question) -> Any:
        return self.page.evaluate(ASK, [kind, question])

    def check(self, lesson: str, task: int, source: str) -> dict[str, Any]:
        found = self.ask("check", lesson=lesson, tasks=[task], source=source)
        assert isinstance(found, list), found
        return found[0]


@pytest.fixture(scope="module")
def in_page(site_http, browser) -> Iterator[Python]:
    """Open a page whose Python several tests ask."""
    with visiting(browser, site_http, reduced_motion="reduce") as visitor:
        visitor.page.set_default_timeout(PATIENCE_MS)
        visitor.page.goto(site_http.url("l2_token_flat/README.md"))
        visitor.page.evaluate(f"KvLive.engine.seconds = {PATIENCE_MS // 1000}")
        yield Python(visitor)


@needs_python
@each_lab
def test_random_events_give_the_same_states_in_the_page(lab, in_page):
    for seed in SEEDS:
        settings, do = lab.scenario(seed)
        found = in_page.ask("lab", lab=lab.name, settings=settings, do=do)
        assert found["trace"]["frames"] == told(lab, settings, do), f"seed {seed} of {lab.name}"
        again = in_page.ask("lab", lab=lab.name, seed=str(seed))
        assert (again["do"], again["settings"]) == (do, settings), "a seed must make the same events everywhere"
    assert not in_page.visitor.complaints


def reference(lesson_id: str, task: int) -> tuple[str, str]:
    """Return a task's module and its source."""
    lesson = read_lesson(ROOT / "lessons" / lesson_id / "lesson.toml")
    module = lesson.task(task).targets[0].file
    return module, (ROOT / module).read_text(encoding="utf-8")


@needs_python
def test_code_that_does_not_end_is_ended_and_named(in_page):
    _, source = reference("l2_token_flat", 2)
    line = "        cut = len(self.free_blocks) - n\n"
    assert source.count(line) == 1
    loop = in_page.check("l2_token_flat", 2, source.replace(line, "        while True:\n            pass\n" + line))
    assert loop["result"]["status"] == "hung", loop["advice"]
    assert re.search(r"allocator\.py:\d+ in alloc_blocks", loop["advice"]["where"]), "the check must name the line"
    bomb = in_page.check("l2_token_flat", 2, source.replace(line, "        return self.alloc_blocks(n)\n"))
    assert bomb["result"]["status"] == "error" and "RecursionError" in bomb["advice"]["headline"]
    module, mine = reference("l2_token_flat", 2)
    mine = mine.replace(line, "        while True:\n            n += 0\n" + line)
    lab = in_page.ask("lab", lab="pool", do="+A=Hello", mine={module: mine})
    assert re.search(r"allocator\.py:\d+", lab["error"]), f"the lab must name the line: {lab}"
    deaf = "        sum(iter(int, 1))\n"  # never comes back to Python code
    in_page.page.evaluate("KvLive.engine.seconds = 10")
    killed = in_page.ask("check", lesson="l2_token_flat", tasks=[2], source=source.replace(line, deaf))
    assert re.search(r"\b10\b", killed["failed"]), "it must be ended with its worker"
    in_page.page.evaluate(f"KvLive.engine.seconds = {PATIENCE_MS // 1000}")
    alive = in_page.check("l2_token_flat", 2, source)
    assert alive["result"]["status"] == "done", "after its worker was ended, Python must start again"


@needs_python
def test_a_run_leaves_nothing_behind_for_the_next(in_page):
    module, source = reference("l2_token_flat", 2)
    mine = source.replace("from collections.abc", "import builtins\nfrom collections.abc").replace(
        "blocks = self.free_blocks[cut:][::-1]", "blocks = self.free_blocks[cut:]"
    )
    question = {"lab": "pool", "do": "+A=one two three four five six"}
    theirs = in_page.ask("lab", **question, mine={module: mine})
    ours = in_page.ask("lab", **question)
    assert theirs["trace"]["frames"][1]["requests"] != ours["trace"]["frames"][1]["requests"], "own code must run"
    assert ours["trace"]["frames"] == told(LABS["pool"], {}, question["do"])


@needs_python
def test_what_a_page_cannot_run_is_said(in_page):
    _, source = reference("l8_radix", 1)
    found = in_page.check("l8_radix", 1, source)
    assert found["result"]["status"] == "done", found["advice"]
    assert [said.split()[0] for said in found["not_checked"]] == ["1"]


BROKEN = [  # a lab, a module, a line and what replaces it, the task whose rule that breaks, and a scenario
    ("pool", "kv/allocator.py", "self.free_blocks.extend(blocks)", "pass", 3, "+A=one two;-A"),
    ("pool", "kv/allocator.py", "self.held -= returned", "raise RuntimeError", 3, "+A=one two;-A"),
    ("pool", "kv/allocator.py", "del self.free_blocks[cut:]", "pass", 2, "+A=one two;+B=one"),
    ("pool", "kv/token_flat.py", "request.blocks.extend(new_blocks)", "pass", 4, "+A=one two"),
    ("table", "kv/block_table.py", "self.allocator.free(self.blocks[keep:])", "pass", 3, "+A=one two;-A"),
    ("table", "kv/block_table.py", "divmod(position, self.allocator.block_size)", "(0, 0)", 2, "+A=one two"),
    ("batch", "engine/scheduler.py", "start + min(budget, self", "start + max(budget, self", 2, "+A=12,4;."),
    ("tree", "kv/refcount.py", "self.counts[block] -= 1", "pass", 1, "+A=one two three four five;*"),
]


@needs_python
@pytest.mark.parametrize("name, module, find, replace, task, do", BROKEN, ids=lambda value: str(value)[:24])
def test_broken_code_ends_a_lab_at_the_event_and_names_the_task(name, module, find, replace, task, do, in_page):
    source = (ROOT / "mini_engine" / module).read_text(encoding="utf-8")
    assert source.count(find) == 1, f"{module} has changed: {find!r} must be in it once"
    mine = {f"mini_engine/{module}": source.replace(find, replace)}
    frames = in_page.ask("lab", lab=name, do=do, mine=mine)["trace"]["frames"]
    assert frames[-1]["broken"]["task"] == task, frames[-1]
    assert not any("broken" in frame for frame in frames[:-1]), "the first event that breaks a rule is the last frame"


@needs_python
@pytest.mark.parametrize("lesson_id", WRITTEN)
def test_a_lesson_s_first_task_turns_green_in_a_browser(lesson_id, in_page):
    task = TASKS[lesson_id][0][0]
    _, source = reference(lesson_id, task)
    found = in_page.check(lesson_id, task, source)
    assert found["result"]["status"] == "done", found["advice"]
    assert not in_page.visitor.complaints


@pytest.mark.ci
@needs_python
def test_from_a_fresh_browser_to_a_green_task_and_a_lab_on_own_code(visit):
    _, source = reference("l2_token_flat", 2)
    page = visit("l2_token_flat/README.md", reduced_motion="reduce")
    box = page.locator("#exercise-2-3")
    box.get_by_role("button", name="Write tasks 2 and 3 here").click()
    box.get_by_role("button", name="Check").click()
    box.locator(".kv-live-verdict.open").wait_for()
    assert "2" in box.locator(".kv-live-verdict").inner_text()
    box.get_by_role("button", name="Hint").click()
    assert re.search(r"\b1\b.*\b3\b", box.locator(".kv-live-verdict").inner_text())
    write(box, source.replace("self.free_blocks.extend(blocks)", "self.free_block = list(blocks)"))
    box.get_by_role("textbox").press("Control+Enter")
    box.locator(".kv-live-verdict.bad").wait_for()
    assert "BlockAllocator.free" in box.locator(".kv-live-verdict").inner_text()
    assert box.locator(".kv-live-tasks .done").count() == 1
    box.get_by_role("button", name="Watch it in the lab").click()
    page.locator(".kv-figure.kv-live").wait_for()
    page.locator(".kv-lab:not([aria-busy])").wait_for()
    page.locator(".kv-figure.kv-live .kv-stage").press("End")
    broken = page.locator("#lab-pool .kv-live-verdict.bad")
    broken.get_by_role("link", name=re.compile(r"\b3\b")).click()
    line = box.evaluate("box => box.exercise.editor.line")
    assert "def free(" in source.splitlines()[line - 1], "to the task's own line"
    write(box, source)
    box.get_by_role("button", name="Check").click()
    box.locator(".kv-live-verdict.good").wait_for()
    page.get_by_role("button", name="Run the lab on your code").click()
    page.locator(".kv-figure.kv-live").wait_for()
    assert page.get_by_label("Run my own allocator.py").is_checked()
    page.wait_for_function(OWN_CODE_HAS_NO_LINK)  # the repository does not show the reader's own
    with page.expect_download() as saved:
        box.get_by_role("button", name="Download allocator.py").click()
    assert Path(saved.value.path()).read_text(encoding="utf-8") == source
    page.reload()
    page.get_by_role("button", name="Go on with tasks 2 and 3").click()
    assert box.evaluate("box => box.exercise.text") == source, "the text must survive a reload"


def ticked(page) -> list[str]:
    """Return the marks in the menu, or on the front page those on lesson 2's place on the map."""
    where = ".kv-map li:has-text('Token-flat')" if page.locator(".kv-map").count() else ".md-nav--primary"
    return page.locator(f"{where} .kv-tick").all_text_contents()


@needs_python
def test_a_task_that_passes_in_the_page_is_ticked_as_one_of_the_terminal_s(tmp_path, visit, site_http):
    _, source = reference("l2_token_flat", 2)
    record = tmp_path / "progress.json"
    page = visit("l2_token_flat/README.md", reduced_motion="reduce")
    box = page.locator("#exercise-2-3")
    box.get_by_role("button", name="Write tasks 2 and 3 here").click()
    write(box, source.replace("self.free_blocks.extend(blocks)", "self.free_block = list(blocks)"))
    box.get_by_role("button", name="Check").click()
    box.locator(".kv-live-verdict.bad").wait_for()
    assert ticked(page) == ["1 task"], "task 2 passes, task 3 does not"
    write(box, source)
    box.get_by_role("button", name="Check").click()
    box.locator(".kv-live-verdict.good").wait_for()
    assert ticked(page) == ["2 tasks"]
    assert page.locator(".kv-done button").get_attribute("aria-pressed") == "false", "two tasks are no lesson"
    page.goto(site_http.url())
    assert ticked(page) == ["2 tasks"]
    assert page.locator("[data-resume]").inner_text() == "Resume lesson 2"
    record.write_text(
        json.dumps({"version": 1, "lessons": {"l2_token_flat": {"tasks_done": [1, 2]}}}), encoding="utf-8"
    )
    page.set_input_files("#kv-import", record)
    page.get_by_text("Imported.").wait_for()
    assert ticked(page) == ["3 tasks"], "the terminal's 1 and 2 with the page's 2 and 3"
    page.reload()
    assert ticked(page) == ["3 tasks"]


def write(box, source: str) -> None:
    """Put a text into an exercise's editor."""
    box.evaluate("(box, text) => { box.exercise.text = text; }", source)


def opened(page, lab: str) -> None:
    """Open the page's lab and wait for its first frames."""
    page.set_default_timeout(PATIENCE_MS)
    page.locator(f"#lab-{lab} .kv-live-go").click()
    page.locator(".kv-figure.kv-live").wait_for()
    page.locator(".kv-lab:not([aria-busy])").wait_for()


@needs_python
@pytest.mark.parametrize("page_id", [*PAGES, ""])
def test_a_lab_is_played_by_hand_and_sent_as_an_address(page_id, site_http, browser):
    lab = PAGES.get(page_id, "tree")
    source = f"{page_id}/README.md".lstrip("/")
    with visiting(browser, site_http, reduced_motion="reduce") as visitor:
        page = visitor.page
        page.goto(site_http.url(source))
        before = page.locator("article .kv-figure[data-trace] .kv-say").last.inner_text()
        opened(page, lab)
        assert page.locator("article .kv-figure.kv-live .kv-say").inner_text() != before, (
            "the lab takes the story's place"
        )
        box, counted = page.locator(f"#lab-{lab}"), page.locator(".kv-figure.kv-live .kv-number")
        box.get_by_text("Settings and more").click()
        box.get_by_role("button", name="Start over").click()
        page.wait_for_function("() => !location.search.includes('%2BA')")
        box.get_by_role("button", name="Arrive").press("Enter")
        page.wait_for_function("() => location.search.includes('%2BA')")
        assert "A" in page.locator(".kv-figure.kv-live .kv-say").inner_text()
        assert box.locator("dl dd").count() >= 3, "the counters of this frame"
        number = counted.inner_text()
        page.reload()
        opened(page, lab)
        assert counted.inner_text().split("/")[1] == number.split("/")[1], "an address must bring the same scenario"
        links = page.locator(".kv-figure.kv-live").evaluate(CODE_LINKS)
        assert links == [linked(code) for _, code in links], "a frame leads to the lines that made it"
        box.get_by_text("Settings and more").click()
        box.get_by_role("button", name="Recorded story").click()
        links = page.locator("article .kv-figure[data-trace]").last.evaluate(CODE_LINKS)
        assert links == [linked(code) for _, code in links], "the story, back again, still does"
        found = looked_over(page, EVERY_LOOK) + visitor.complaints
        assert not found, "\n".join(found)


CODE_LINKS = """figure => figure.player.trace.frames.map((frame, i) => {
    figure.player.show(i);
    const link = figure.querySelector(".kv-say a");
    return [link.offsetHeight > 0 ? link.href : "", frame.code];
})"""
OWN_CODE_HAS_NO_LINK = f"""() => ({CODE_LINKS})(document.querySelector(".kv-figure.kv-live"))
    .every(([href, code]) => Boolean(href) !== code.includes("allocator.py"))"""


def linked(code: str) -> list[str]:
    """Return where the repository shows a function, and its name."""
    file, first, last = place_of(code)
    return [f"{REPOSITORY}/blob/main/{file}#L{first}-L{last}", code]


def test_nothing_of_python_is_loaded_before_a_click(site_http, browser):
    for source in ("README.md", "l2_token_flat/README.md"):
        with visiting(browser, site_http) as visitor:
            seen: list[str] = []
            visitor.page.on("request", lambda request, seen=seen: seen.append(request.url))
            visitor.page.goto(site_http.url(source), wait_until="networkidle")
            assert not [url for url in seen if "/live/vendor/" in url or url.endswith("worker.js")], source


def test_an_exercise_s_tasks_are_those_of_its_lesson_and_module(site_folders):
    for page, groups in TASKS.items():
        html = (site_folders["http"] / page / "index.html").read_text(encoding="utf-8")
        shown = [
            json.loads(unescape(text)) for text in re.findall(r'class="kv-exercise"[^>]* data-about="(.*?)"', html)
        ]
        assert [[task["number"] for task in one["tasks"]] for one in shown] == groups
        for one in shown:
            lesson = read_lesson(ROOT / "lessons" / page / "lesson.toml")
            modules = {target.file for task in one["tasks"] for target in lesson.task(task["number"]).targets}
            assert modules == {one["module"]}
            assert all(f"task {task['number']}: " in one["starter"] for task in one["tasks"]), (
                "the bodies are unwritten"
            )
