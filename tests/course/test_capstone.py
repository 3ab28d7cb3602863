"""Course machinery. The capstone page: each thread is cited whole, led back to a lesson, and rebuilt in lines that run.

Protects readers from a reproduction that no longer shows anything: the engine's names move, and a block without an
assertion would go on passing.
"""

import ast
import re
from itertools import pairwise

import pytest

from lessons._course.pages import Block, Heading, Page
from lessons._course.places import Places

ROOT = Places.find().root
PAGE = Page.read(ROOT / "lessons" / "capstone.md")
TRACKS = {"Core": {0, 1, 2, 3, 4, 5, 6, 7, 8}, "Speed": {3, 8, 9, 10, 14}, "Models": {3, 11, 14, 15, 16}}
TRACKS |= {"Memory": {12, 17}, "Machines": {13, 18, 19}}
MOST_LINES = 30
THREAD = re.compile(r"\[(?:vllm-project/router )?#(\d+)\]\(https://github\.com/([\w-]+/[\w-]+)/(?:issues|pull)/(\d+)\)")
PROJECTS = {"vllm-project/vllm", "vllm-project/router", "sgl-project/sglang"}
BLOCKS = [block for block in PAGE.blocks if block.language == "python"]


def sections() -> dict[str, list[Heading]]:
    """Return the threads' headings by track."""
    found, track = {}, ""
    for heading in PAGE.headings:
        if heading.level == 2:
            track = heading.text
        elif heading.level == 3:
            found.setdefault(track, []).append(heading)
    return found


THREADS = [(track, heading.text) for track, headings in sections().items() for heading in headings]


def title_of(block: Block) -> str:
    return max(
        (heading for heading in PAGE.headings if heading.line < block.line), key=lambda heading: heading.line
    ).text


def test_each_track_has_two_or_three_threads():
    assert {track: len(headings) for track, headings in sections().items()}.keys() == TRACKS.keys()
    assert all(2 <= len(headings) <= 3 for headings in sections().values())


@pytest.mark.parametrize(("track", "title"), THREADS, ids=lambda text: text)
def test_a_thread_is_cited_with_its_state_and_led_back_to_a_lesson_of_its_track(track, title):
    text = PAGE.section(title)
    cited = THREAD.findall(text)
    assert cited and all(shown == linked and project in PROJECTS for shown, project, linked in cited)
    assert re.search(r"\b(closed|merged)\b", text), "it is over: say how"
    assert re.search(r"\b(January|February|March|April|May|June|July|August|\w+ber),? 20\d\d\b", text), (
        "and when it began"
    )
    lessons = {int(number) for number in re.findall(r"\(l(\d+)_\w+/README\.md\)", text)}
    assert lessons & TRACKS[track], f"which lesson of {sorted(TRACKS[track])} explains it?"
    assert [title_of(block) for block in BLOCKS].count(title) == 1, "the idea, in one block"


def test_no_thread_is_cited_outside_its_project():
    links = [link.target for link in PAGE.links if "github.com" in link.target]
    threads = [link for link in links if re.search(r"/(issues|pull)/", link)]
    assert len(threads) == len(THREAD.findall("\n".join(PAGE.lines))), "write #number, linked to that number"


@pytest.mark.parametrize("block", BLOCKS, ids=title_of)
def test_the_lines_run_are_few_and_show_both_results(block):
    source = "\n".join(block.lines)
    code = ast.parse(source)
    assert len(block.lines) <= MOST_LINES
    assert sum(isinstance(node, ast.Assert) for node in ast.walk(code)) >= 2, "what is wrong, and what is right"
    exec(compile(code, title_of(block), "exec"), {"__name__": "capstone"})


def test_the_page_is_in_the_menu_and_one_of_the_last_lessons_leads_to_it():
    assert "capstone.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    lessons = sorted(
        (ROOT / "lessons").glob("l*/lesson.toml"), key=lambda path: int(path.parent.name[1:].split("_")[0])
    )
    assert any("(../capstone.md)" in (path.parent / "README.md").read_text(encoding="utf-8") for path in lessons[-3:])
    for page in ("README.md", "coming-from.md"):
        assert "(capstone.md)" in (ROOT / "lessons" / page).read_text(encoding="utf-8")


def test_the_table_of_tracks_leads_to_each():
    rows = [line for line in PAGE.lines if line.startswith("| [")]
    anchors = [re.match(r"\| \[(\w+)\]\(#(\w+)\)", row).groups() for row in rows]
    assert [name.capitalize() for name, _ in anchors] == list(TRACKS) and all(
        name == anchor for name, anchor in anchors
    )
    assert all(first < second for first, second in pairwise(heading.line for heading in PAGE.headings))
