"""Course machinery. The front page's map: the lessons in five tracks, each with its time, its needs and its gain.

Everything comes from lesson.toml and mkdocs.yml, so a new lesson appears automatically: in its track, or in the last
    one.
"""

from html import escape
from pathlib import Path

from scripts import ROOT

import yaml

from lessons._course.catalog import Lesson, read_lessons
from lessons._course.places import Places

PARTIAL = ROOT / "site" / "theme" / "partials" / "tracks.html"
MORE = '<label class="kv-map__more"><input type="checkbox"> Show what each needs and what it bought</label>'  # phones
TRACKS = {  # name: its topic, its lessons, its colour
    "Core": ("an engine that serves many users", range(9), "a"),
    "Speed": ("the same tokens, sooner", (9, 10, 14), "b"),
    "Models": ("other kinds of layers", (11, 15, 16), "c"),
    "Memory": ("more tokens in less of it", (12, 17, 20), "d"),
    "Machines": ("more than one process", (13, 18, 19), "e"),
}


def bought() -> dict[str, str]:
    """Return each lesson's gain, by its place on the site."""
    pages = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)["extra"]["pages"]
    return {place: about["bought"] for place, about in pages.items() if "bought" in about}


def stop(lesson: Lesson, told: dict[str, str]) -> str:
    """Return a lesson as a stop on the map. Each needs the previous one, unless it says otherwise."""
    numbers = [str(need).partition("_")[0].removeprefix("l") for need in lesson.needs]
    needs = f"needs {', '.join(numbers)}" if numbers else "needs nothing"
    minutes = f"{lesson.minutes} minutes"
    return (
        f"<li><a href=\"{{{{ '{lesson.id}/' | url }}}}\"><b>{lesson.number}</b> <span>{escape(lesson.title)}</span></a>"
        f"<small>{minutes}, {needs}</small><p>{escape(told.get(f'{lesson.id}/', ''))}</p></li>"
    )


def tracks() -> str:
    """Return the map as a partial of the theme."""
    lessons, told = read_lessons(Places.find()), bought()
    placed = {number for _, numbers, _ in TRACKS.values() for number in numbers}
    parts = []
    for name, (about, numbers, shade) in TRACKS.items():
        is_last = name == list(TRACKS)[-1]
        own = [one for one in lessons if one.number in numbers or (is_last and one.number not in placed)]
        stops = "\n".join(stop(lesson, told) for lesson in own)
        parts.append(f'<section class="{shade}"><h3>{name} <small>{about}</small></h3>\n<ol>\n{stops}\n</ol></section>')
    head = f'{{#- Written by scripts/pages/tracks.py. -#}}\n<div class="kv-map">\n{MORE}\n'
    return head + "\n".join(parts) + "\n</div>\n"


def files() -> dict[Path, str]:
    """Return the text that the partial should have."""
    return {PARTIAL: tracks()}
