"""Course machinery. The tables of lessons on the home page and the teachers' page.

All of it comes from lesson.toml and mkdocs.yml, except two things that are kept from the page: the idea of a lesson in
a few words, and the times of its check and its smoke script.
"""

from pathlib import Path

from scripts import ROOT
from scripts.pages.generated import fill
from scripts.pages.tracks import bought

from lessons._course.catalog import Lesson, read_lessons
from lessons._course.places import Places

HOME, TEACHERS = ROOT / "lessons" / "README.md", ROOT / "lessons" / "teachers.md"
NAME = "lessons"


def cells_of(page: str, columns: int) -> dict[str, list[str]]:
    """Return the rows of the page's tables with `columns` columns, by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    return {row[0]: row for row in rows if len(row) == columns}


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (head, ["---"] * len(head), *rows))


def home(lessons: list[Lesson], page: str) -> str:
    """Return the home page's table: each lesson's idea, minutes, needs and gain."""
    head = ["", "lesson", "the idea", "minutes", "needs", "what it bought"]
    told, old, rows = bought(), cells_of(page, len(head)), []
    for lesson in lessons:
        number, link = str(lesson.number), f"[{lesson.title}]({lesson.id}/README.md)"
        needs = f"lesson{'s' if len(lesson.needs) > 1 else ''} {', '.join(map(str, lesson.needs))}"
        idea = old[number][2] if number in old else lesson.summary
        takes = [str(lesson.minutes), needs if lesson.needs else "nothing", told.get(f"{lesson.id}/", "")]
        rows.append([number, link, idea, *takes])
    return table(head, rows)


def teachers(lessons: list[Lesson], page: str) -> str:
    """Return the teachers' table: each lesson's minutes, tasks, bugs and measured times."""
    head = ["lesson", "title", "minutes", "tasks", "bugs", "check", "smoke script"]
    old, rows = cells_of(page, len(head)), []
    for lesson in lessons:
        counts = [
            str(one) for one in (lesson.number, lesson.title, lesson.minutes, len(lesson.tasks), len(lesson.bugs))
        ]
        rows.append([*counts, *old.get(counts[0], ["", "–", "–"])[-2:]])
    return table(head, rows)


def files() -> dict[Path, str]:
    """Return the wanted texts of both pages."""
    lessons = read_lessons(Places.find())
    first, second = (path.read_text(encoding="utf-8") for path in (HOME, TEACHERS))
    return {HOME: fill(first, NAME, home(lessons, first)), TEACHERS: fill(second, NAME, teachers(lessons, second))}
