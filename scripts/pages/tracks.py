"""Course machinery. The front page's map: the core and the tracks, each lesson with its time, its needs and its gain.

Everything comes from tracks.toml, lesson.toml and mkdocs.yml, so a new lesson appears automatically.
"""

from html import escape
from pathlib import Path

from scripts import ROOT

import yaml

from lessons._course.catalog import Lesson, read_lessons
from lessons._course.output import listed
from lessons._course.places import Places
from lessons._course.tracks import Plan, Track, read_syllabus

PARTIAL = ROOT / "site" / "theme" / "partials" / "tracks.html"
MORE = '<label class="kv-map__more"><input type="checkbox"> Show what each needs and what it bought</label>'  # phones
SHADES = "abcdefg"


def bought() -> dict[str, str]:
    """Return each lesson's gain, by its place on the site."""
    pages = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)["extra"]["pages"]
    return {place: about["bought"] for place, about in pages.items() if "bought" in about}


def hours(lessons: list[Lesson]) -> str:
    """Return the time that the lessons' core takes: "11.5 hours"."""
    return f"{sum(lesson.core_minutes for lesson in lessons) / 60:.1f} hours".replace(".0", "")


def minutes(lesson: Lesson) -> str:
    """Return "90 minutes", or "150 to 200" if a part of the lesson is beyond its core."""
    whole = f" to {lesson.minutes}" if lesson.minutes > lesson.core_minutes else ""
    return f"{lesson.core_minutes}{whole} minutes"


def link(lesson: Lesson) -> str:
    return f"{{{{ ('{lesson.id}/' ~ index) | url }}}}"


def stop(lesson: Lesson, told: dict[str, str]) -> str:
    """Return a lesson as a stop on the map."""
    needs = f"needs {', '.join(map(str, lesson.needs))}" if lesson.needs else "needs nothing"
    return (
        f'<li><a href="{link(lesson)}"><b>{lesson.number}</b> <span>{escape(lesson.title)}</span></a>'
        f"<small>{minutes(lesson)}, {needs}</small><p>{escape(told.get(f'{lesson.id}/', ''))}</p></li>"
    )


def section(track: Track, shade: str, lessons: list[Lesson], told: dict[str, str]) -> str:
    own = track.of(lessons)
    stops = "\n".join(stop(lesson, told) for lesson in own)
    head = f"<h3>{track.title} <small>{escape(track.idea)}, {hours(own)}</small></h3>"
    return f'<section class="{shade}">{head}\n<ol>\n{stops}\n</ol></section>'


def plan_in_words(plan: Plan) -> str:
    """Return "lessons 0, 1 and 2, and the page of 3"."""
    text = f"lessons {listed(plan.lessons)}"
    if plan.read:
        text += f", and the page of {listed(plan.read)}"
    return text + (f", then {listed(plan.then, 'or')}" if plan.then else "")


def plans(of: tuple[Plan, ...]) -> str:
    rows = "\n".join(f"<dt>{plan.hours} hours</dt><dd>{plan_in_words(plan).capitalize()}</dd>" for plan in of)
    return f'<section class="kv-plans"><h3>How much time have you?</h3>\n<dl>\n{rows}\n</dl></section>'


def tracks() -> str:
    """Return the map as a partial of the theme."""
    places, told = Places.find(), bought()
    lessons = read_lessons(places)
    syllabus = read_syllabus(places, lessons)
    parts = [section(track, shade, lessons, told) for track, shade in zip(syllabus.tracks, SHADES, strict=False)]
    head = f'{{#- Written by scripts/pages/tracks.py. -#}}\n<div class="kv-map">\n{MORE}\n'
    return head + "\n".join([*parts, plans(syllabus.plans)]) + "\n</div>\n"


def files() -> dict[Path, str]:
    """Return the text that the partial should have."""
    return {PARTIAL: tracks()}
