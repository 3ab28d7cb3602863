"""Course machinery. The lab in which the reader is the evictor: what it lets go, what it counts, and how it is played.

Protects readers from a game that they cannot win or lose fairly: blocks that go unasked, hits that a policy would count
otherwise, an oracle that can be beaten.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

from scripts import ROOT
from scripts.live.labs.evictor import MOST_LEAVES, YOU, Evictor
from scripts.live.labs.lab import Lab
from scripts.live.labs.oracle import found_by_oracle
from scripts.traces.turns import SHARED, Turn
from scripts.website import live
from scripts.website.browser import visiting

import pytest

from mini_engine.base.errors import UserError
from tests.course.looks import EVERY_LOOK, looked_over
from tests.course.site_fixtures import PATIENCE_MS
from tests.course.test_live import needs_python, opened

PAGE = "l20_agents/README.md"
GAMES = [{"load": seed, "agents": 1 + seed % 3, "blocks": 11 + seed % 6} for seed in range(1, 13)]
each_game = pytest.mark.parametrize("settings", GAMES, ids=lambda given: f"load {given['load']}")


def played(settings, choose) -> Evictor:
    """Play a game to its end: `choose` returns the number of a leaf."""
    lab = Evictor(Evictor.settings(settings))
    while lab.choices:
        lab.leave(choose(lab))
    return lab


def at_random(settings):
    chance = random.Random(settings["load"])
    return played(settings, lambda lab: chance.choice(sorted(lab.choices)))


def scores(lab: Lab) -> dict[str, int]:
    return {score["name"]: score["found"] for score in lab.frames[-1]["scores"]}


def of_frame(frame) -> list[str]:
    return [block for node in frame["nodes"] for block in node["blocks"]]


@each_game
def test_who_chooses_as_a_policy_finds_what_the_policy_finds(settings):
    as_lru = scores(Evictor.play(settings, "*"))
    assert as_lru[YOU] == as_lru["LRU"], "the lab counts other hits than a tree with LRU"
    known = played(
        settings, lambda lab: min(lab.choices, key=lambda number: lab.reader.sessions.rank(lab.choices[number]))
    )
    assert scores(known)[YOU] == scores(known)["sessions"], "the lab shows the reader something else than sessions know"


@each_game
def test_no_choices_find_more_than_the_oracle(settings):
    found = scores(at_random(settings))
    assert found["Belady"] >= max(found.values()), f"the oracle is beaten: {found}"


def test_the_oracle_lets_go_what_is_never_found_before_what_is_found_late():
    """An answer is not looked up, and the last block of a prompt is always computed: the rest of a leaf may be dear."""
    texts = {"1": "abc", "2": "abc", "3": "abcd"}
    load = [
        Turn(second, name, (SHARED, *(name + letter for letter in texts[name])))
        for second, name in enumerate(("1", "2", "3", "1", "2"))
    ]
    assert found_by_oracle(load, 7) == 6, "question 3 needs four blocks; evict 1b, 1c, 2b and 2c, and keep 1a and 2a"


@each_game
def test_only_what_the_reader_has_chosen_goes_and_no_block_is_lost(settings):
    chance, lab = random.Random(settings["load"]), Evictor(Evictor.settings(settings))
    while lab.choices:
        blocks = of_frame(lab.frames[-1])
        assert len(set(blocks)) == len(blocks) <= settings["blocks"]
        number = chance.choice(sorted(lab.choices))
        branch = {name for node in lab.choices[number].path() for name in lab.turns.names_of(node)}
        asked = lab.turns.missing
        lab.leave(number)
        gone = lab.frames[-1]["evicted"][:asked]
        assert gone[0] in branch and SHARED not in gone, f"leaf {number} was chosen, of {branch}; {gone} went"


def test_a_leaf_in_use_has_no_number():
    lab = Evictor(Evictor.settings({}))
    marked = [node for node in lab.frames[-1]["nodes"] if node["words"] == "in use"]
    assert marked and not any(node["pick"] for node in marked), "a running turn's prefix can be chosen"


@each_game
def test_a_game_is_short_and_its_leaves_can_be_chosen_with_one_digit(settings):
    lab = at_random(settings)
    assert len(lab.frames) < 48, "the lab ends before the load does, without a result"
    assert max(len(frame["choices"]) for frame in lab.frames) < MOST_LEAVES


@pytest.mark.parametrize("do", ["+A=Hello", "!A=3", "-9", "-A", "*;-1"])
def test_what_the_game_does_not_know_is_refused_in_one_sentence(do):
    with pytest.raises(UserError) as refused:
        Evictor.play({}, do)
    assert "\n" not in str(refused.value)


def test_all_that_it_imports_is_packed_for_the_page_and_needs_no_tensors():
    told = (
        "import json, sys; sys.modules['torch'] = None; import scripts.live.labs.evictor; "
        "print(json.dumps([module.__file__ for module in sys.modules.values() if getattr(module, '__file__', None)]))"
    )
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    files = {Path(file) for file in json.loads(done.stdout) if Path(file).is_relative_to(ROOT)}
    ours = {file for file in files if ".venv" not in file.parts}
    assert ours and ours <= set(live.course_files()), f"scripts/website/live.py lacks {ours - set(live.course_files())}"


@needs_python
def test_it_is_played_with_keys_and_clicks_and_sent_as_an_address(site_http, browser):
    with visiting(browser, site_http, reduced_motion="reduce") as visitor:
        page = visitor.page
        page.goto(site_http.url(PAGE))
        opened(page, "evictor")
        box, settled = page.locator("#lab-evictor"), page.locator(".kv-lab:not([aria-busy])")
        first = box.get_by_role("button", name="Evict 1")
        assert "ago" in (first.get_attribute("aria-label") or ""), "without the picture, a number says nothing"
        first.press("Enter")
        page.wait_for_function("() => location.search.endsWith('-1')")
        settled.wait_for()
        assert page.evaluate("document.activeElement.dataset.verb") == "-1", "the next choice is where the last one was"
        page.locator(".kv-figure.kv-live [data-event='-2']").click()
        page.wait_for_function("() => location.search.endsWith('-1%3B-2')")
        settled.wait_for()
        page.reload()
        opened(page, "evictor")
        assert page.evaluate("document.querySelector('#lab-evictor').lab.events") == ["-1", "-2"]
        box.get_by_role("button", name="LRU to the end").click()
        box.locator("dt", has_text="Belady").wait_for()
        found = page.evaluate("document.querySelector('.kv-figure.kv-live').player.trace.frames.at(-1).scores")
        assert found == Evictor.play({}, "-1;-2;*").frames[-1]["scores"], "the page plays another game"
        assert all(button.is_disabled() for button in box.locator(".kv-live-acts button").all()), "nothing is to choose"
        page.set_default_timeout(PATIENCE_MS)
        found = looked_over(page, EVERY_LOOK) + visitor.complaints
        assert not found, "\n".join(found)
