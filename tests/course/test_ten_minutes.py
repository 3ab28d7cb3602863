"""Course machinery. The page of ten minutes: it has its pictures, and its figures are those of recorded runs.

Protects the readers who have no more time than that from a figure that no run gave.
"""

import re

from scripts import ROOT
from scripts.pages import chats, ten_minutes, tracks
from scripts.traces.tape import read_trace
from scripts.website.player_links import GITHUB_ONLY

import pytest

LESSONS = ROOT / "lessons"
PAGE = GITHUB_ONLY.sub("", (ten_minutes.FOLDER / "README.md").read_text(encoding="utf-8"))
TEXT = re.sub(r"\[?!\[.*?\]\(.*?\)(\]\(.*?\))?|<[^>]*>|\]\([^)]*\)", "", PAGE)  # without pictures, marks and addresses


def numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d,.]*\d|\d", text)


def last_frame(trace: str) -> dict:
    return read_trace((LESSONS / trace).read_text(encoding="utf-8"))["frames"][-1]


def test_it_has_a_picture_for_each_idea_without_scripts_too():
    shown = re.findall(r"!\[.+?\]\((.*?)\)", PAGE)
    assert len(shown) == len(re.findall(r"^## \d\.", PAGE, re.MULTILINE)) == 6
    assert all((ten_minutes.FOLDER / place).is_file() for place in shown)


def figures() -> dict[str, list[str]]:
    """Return the page's figures by where they are from."""
    first, second = ten_minutes.read()["turns"]
    asked, size = chats.read_chats()
    found, tokens, _ = chats.steps(asked, size)[-1]
    rows = [row.split(" | ") for row in (LESSONS / "what-models-keep.md").read_text(encoding="utf-8").splitlines()]
    (llama,) = (row for row in rows if row[0] == "| Llama 3.1 70B" and len(row) > 6)
    work, reserved = last_frame("l0_the_loop/work.trace.js"), last_frame("l1_contiguous/reserved.trace.js")
    return {
        "ten-minutes/chat.json": [str(len(turn["prompt"])) for turn in (first, second)] + [str(second["found"])],
        "its parts": [str(len(words)) for _, _, words in ten_minutes.parts(ten_minutes.read())[::2]],
        "lesson 0's trace": list(map(str, work["counts"])),
        "lesson 1's trace": re.findall(r"(\d+) %", reserved["say"]),
        "lesson 2's gain": numbers(tracks.bought()["l2_token_flat/"]),
        "lesson 8's trace": [str(found), str(tokens), f"{100 * found / tokens:.0f}"],
        "what-models-keep.md": [f"{int(llama[2].replace(',', '')) / 1024:.0f}", str(int(float(llama[5].split()[0])))],
    }


def test_its_figures_are_those_of_recorded_runs():
    told = numbers(TEXT)
    missing = {place: [one for one in wanted if one not in told] for place, wanted in figures().items()}
    assert not any(missing.values()), f"the page should give these figures: {missing}"


@pytest.mark.nightly
def test_the_recorded_chat_is_what_the_engine_does():
    assert ten_minutes.record() == ten_minutes.read(), "python -m scripts.pages.ten_minutes"
