"""Course machinery. The tables of lessons in the README, on the home page, for teachers and in the capstone; the plans.

All of it comes from tracks.toml, lesson.toml and mkdocs.yml. Kept from the pages are an idea in a few words, where keys
and values are, the times of a check and its smoke script, and a track's threads.
"""

from collections.abc import Callable
from pathlib import Path

from scripts import ROOT
from scripts.pages.generated import fill
from scripts.pages.tracks import bought, hours, minutes, plan_in_words

from lessons._course.catalog import Lesson, read_lessons
from lessons._course.output import listed
from lessons._course.places import Places
from lessons._course.tracks import Syllabus, Track, read_syllabus

README, HOME, TEACHERS, CAPSTONE = (
    ROOT / name for name in ("README.md", "lessons/README.md", "lessons/teachers.md", "lessons/capstone.md")
)


def cells_of(page: str, columns: int) -> dict[str, list[str]]:
    """Return the rows of the page's tables with `columns` columns, by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    return {row[0]: row for row in rows if len(row) == columns}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def by_track(syllabus: Syllabus, lessons: list[Lesson], head: list[str], row: Callable[[Lesson], list[str]]) -> str:
    """Return a table with a line for each track, and below it a row for each of its lessons."""
    rows = []
    for track in syllabus.tracks:
        own = track.of(lessons)
        rows.append(["", f"**{track.title}**: {track.idea}, {hours(own)}", *[""] * (len(head) - 2)])
        rows += [row(lesson) for lesson in own]
    return table(head, rows)


def needs(lesson: Lesson) -> str:
    return ", ".join(map(str, lesson.needs)) or "nothing"


def readme(syllabus: Syllabus, lessons: list[Lesson], page: str) -> str:
    """Return the README's table: where each lesson keeps K and V."""
    head = ["", "lesson", "where keys (K) and values (V) are stored"]
    old = cells_of(page, len(head))

    def row(lesson: Lesson) -> list[str]:
        number = str(lesson.number)
        return [number, f"[{lesson.title}](lessons/{lesson.id}/README.md)", old.get(number, ["", "", "–"])[2]]

    return by_track(syllabus, lessons, head, row)


def home(syllabus: Syllabus, lessons: list[Lesson], page: str) -> str:
    """Return the home page's table: each lesson's idea, minutes, needs and gain."""
    head = ["", "lesson", "the idea", "minutes", "needs", "what it bought"]
    told, old = bought(), cells_of(page, len(head))

    def row(lesson: Lesson) -> list[str]:
        number = str(lesson.number)
        idea = old[number][2] if number in old else lesson.summary
        takes = [minutes(lesson).removesuffix(" minutes"), needs(lesson), told.get(f"{lesson.id}/", "")]
        return [number, f"[{lesson.title}]({lesson.id}/README.md)", idea, *takes]

    return by_track(syllabus, lessons, head, row)


def teachers(syllabus: Syllabus, lessons: list[Lesson], page: str) -> str:
    """Return the teachers' table: each lesson's minutes, sittings, tasks, bugs and measured times."""
    head = ["", "lesson", "minutes", "sittings", "needs", "tasks", "bugs", "check", "smoke script"]
    old = cells_of(page, len(head))

    def row(lesson: Lesson) -> list[str]:
        number, core = str(lesson.number), len(lesson.core)
        tasks = f"{len(lesson.tasks)}" if core == len(lesson.tasks) else f"{core} + {len(lesson.tasks) - core}"
        times = [minutes(lesson).removesuffix(" minutes"), str(len(lesson.sittings)), needs(lesson)]
        return [number, lesson.title, *times, tasks, str(len(lesson.bugs)), *old.get(number, ["–", "–"])[-2:]]

    return by_track(syllabus, lessons, head, row)


def capstone(syllabus: Syllabus, page: str) -> str:
    """Return the capstone's table: where each track's threads are."""
    head = ["track", "lessons", "threads"]
    old = cells_of(page, len(head))

    def row(track: Track) -> list[str]:
        name = f"[{track.title.lower()}](#{track.id})"
        return [name, listed(track.lessons), old.get(name, ["", "", "–"])[2]]

    return table(head, [row(track) for track in syllabus.tracks])


def plans(syllabus: Syllabus) -> str:
    return table(["hours", "plan"], [[str(plan.hours), plan_in_words(plan)] for plan in syllabus.plans])


def files() -> dict[Path, str]:
    """Return the wanted texts of the four pages."""
    places = Places.find()
    lessons = read_lessons(places)
    syllabus = read_syllabus(places, lessons)
    pages = {path: path.read_text(encoding="utf-8") for path in (README, HOME, TEACHERS, CAPSTONE)}
    for path, tabled in ((README, readme), (HOME, home), (TEACHERS, teachers)):
        pages[path] = fill(pages[path], "lessons", tabled(syllabus, lessons, pages[path]))
    pages[CAPSTONE] = fill(pages[CAPSTONE], "tracks", capstone(syllabus, pages[CAPSTONE]))
    pages[README] = fill(pages[README], "plans", plans(syllabus))
    return pages
