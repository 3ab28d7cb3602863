"""Course machinery. A Markdown extension for the website: turns comments into labs, editors and models in the page.

`<!-- lab: pool -->` below a player puts the lab of that name there, `<!-- exercise: 2, 3 -->` an editor for these tasks
of the page's lesson, which must be in one module, `<!-- model: pocket -->` the pocket model. Elsewhere a comment shows
nothing; where scripts do not run, the element describes what is missing. Loading this packs the course's files for the
pages (scripts/website/live.py).
"""

import functools
import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any

from scripts import ROOT
from scripts.live.answers import MOST_ANSWER, SETTINGS
from scripts.live.labs import LABS
from scripts.website import live
from scripts.website.player_links import BEFORE_HTML, addresses
from scripts.website.repo_links import page_path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

from lessons._course.catalog import Lesson, read_lesson
from lessons._course.places import Places
from lessons._course.student import starter_of, student_files

COMMENT = re.compile(r"^<!-- (?P<what>lab|exercise|model): (?P<which>[\w, ]+) -->$", re.MULTILINE)


class LiveLinks(Preprocessor):
    """Replaces the comments of one page."""

    def __init__(self, md: Markdown) -> None:
        super().__init__(md)
        self.sizes = {key: f"{size:.1f}" for key, size in packed_sizes().items()}

    def run(self, lines: list[str]) -> list[str]:
        return [self.element(line) if COMMENT.match(line) else line for line in lines]

    def element(self, comment: str) -> str:
        found = COMMENT.match(comment)
        assert found
        what, which = found["what"], found["which"]
        anchor = f"{what}-{which}"
        if what == "lab":
            data = LABS[which].described() | {"code": self.places(anchor, LABS[which].code)}
        elif what == "model":
            data = {"slots": SETTINGS["blocks"] * SETTINGS["size"], "most": MOST_ANSWER}
            data |= {"code": self.places(anchor, LABS["pool"].code)}
        else:
            data = exercise(page_lesson(self.md), numbers(which))
            anchor = f"{what}-{'-'.join(map(str, numbers(which)))}"
        about = escape(json.dumps(data | {"sizes": self.sizes})).replace("\n", "&#10;")
        without = self.without_scripts(what, data)
        return f'<div class="kv-{what}" id="{anchor}" data-about="{about}"><noscript><p>{without}</p></noscript></div>'

    def without_scripts(self, what: str, data: dict[str, Any]) -> str:
        """Return a sentence for readers without JavaScript: what the element is, and where to read or do the same."""
        if what == "exercise":
            which = " and ".join(str(task["number"]) for task in data["tasks"])
            check = f"python -m lessons check {data['lesson'].partition('_')[0].removeprefix('l')}"
            tasks = '<a href="#your-tasks">tasks</a>'
            return (
                f"With JavaScript, an editor for the {tasks} {which} is here, checked by the lesson's own tests. "
                f"In a terminal, write them in <code>{data['path']}</code> and run <code>{check}</code>."
            )
        links = ", ".join(f'<a href="{link}">{code.rpartition("::")[2]}</a>' for code, link in data["code"].items())
        begins = "the pocket model answers here" if what == "model" else f"a lab is here: {data['title']}"
        return f"With JavaScript, {begins}. It runs this code of the course: {links}."

    def places(self, shown: str, names: Iterable[str]) -> dict[str, str]:
        """Return the repository addresses of the functions that frames name, as for a recorded trace."""
        page = page_path(self.md)
        return {} if page is None else addresses(self.md, page, shown, names)


def numbers(which: str) -> list[int]:
    return [int(number) for number in which.split(",")]


def exercises(page: str) -> list[list[int]]:
    """Return the tasks of each exercise in a page's source."""
    return [numbers(found["which"]) for found in COMMENT.finditer(page) if found["what"] == "exercise"]


def page_lesson(md: Markdown) -> Lesson:
    """Return the lesson of the current page."""
    return read_lesson(ROOT / "lessons" / (page_path(md) or "").split("/")[0] / "lesson.toml")


def exercise(lesson: Lesson, tasks: list[int]) -> dict[str, Any]:
    """Return a page's data for an editor of these tasks."""
    places = Places(ROOT, ROOT / "work")
    (module,) = {target.file for number in tasks for target in lesson.task(number).targets}
    file = next(file for file in student_files(lesson, places) if file.module == module)
    return {
        "lesson": lesson.id,
        "module": module,
        "path": places.shown(file.path),
        "starter": starter_of(lesson, file),
        "tasks": [
            {"number": task.number, "title": task.title, "symbol": task.targets[0].symbol, "hints": task.hints}
            for task in map(lesson.task, tasks)
        ],
    }


def packed_sizes() -> dict[str, float]:
    """Pack the course's files, if any has changed, and return a reader's downloads; empty if there is no Python."""
    if not live.is_complete():
        return {}
    return pack(tuple((path, path.stat().st_mtime_ns) for path in live.sources()))


@functools.cache
def pack(stamps: tuple) -> dict[str, float]:
    live.pack()
    return live.sizes()


class LiveLinksExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(LiveLinks(md), "live_links", BEFORE_HTML)


def makeExtension(**settings) -> LiveLinksExtension:
    return LiveLinksExtension(**settings)
