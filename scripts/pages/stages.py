"""Course machinery. The lower half of the home page's drawing: the core as steps, and the tracks that open after it."""

from pathlib import Path

from scripts import ROOT
from scripts.pages.generated import fill

from lessons._course.catalog import Lesson, read_lessons
from lessons._course.places import Places
from lessons._course.tracks import Track, read_syllabus

PICTURE = ROOT / "lessons" / "ladder-of-stages.svg"
GROUND, LEFT, STEP, RISE = 584, 32, 66, 14  # the steps' lower edge, where they begin, their width, how much they rise
ROW, FIRST_ROW, LABEL, BOX = 37, 402, 530, 104  # the tracks: height of a row, the first one, their names, a lesson


def words(lesson: Lesson) -> list[str]:
    """Return the lesson's short name, a word a line: "block", "tensor"."""
    return lesson.id.split("_")[1:]


def text(x: float, y: float, said: str, size: int, weight: int = 400) -> str:
    return f'<text class="ink" x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}">{said}</text>'


def step(index: int, lesson: Lesson) -> str:
    """Return a lesson of the core: each a little higher than the one before."""
    x, top = LEFT + index * STEP, 512 - index * RISE
    box = f'<rect class="step" x="{x}" y="{top}" width="{STEP - 4}" height="{GROUND - top}" rx="6"/>'
    middle = x + (STEP - 4) / 2
    lines = [text(middle, top + 42 + 14 * i, word, 10) for i, word in enumerate(words(lesson))]
    return "".join([box, text(middle, top + 24, str(lesson.number), 15, weight=600), *lines])


def row(index: int, track: Track, lessons: list[Lesson]) -> list[str]:
    """Return a track's name, and its lessons side by side."""
    y = FIRST_ROW + index * ROW
    parts = [f'<g text-anchor="start">{text(LABEL, y + 20, track.title, 13, weight=600)}</g>']
    for place, lesson in enumerate(track.of(lessons)):
        x = LABEL + 78 + place * (BOX + 4)
        box = f'<rect class="step" x="{x}" y="{y}" width="{BOX}" height="{ROW - 8}" rx="6"/>'
        parts.append(box + text(x + BOX / 2, y + 20, f"{lesson.number} {' '.join(words(lesson))}", 12))
    return parts


def lower_half() -> str:
    places = Places.find()
    lessons = read_lessons(places)
    core, *tracks = read_syllabus(places, lessons).tracks
    steps = [step(index, lesson) for index, lesson in enumerate(core.of(lessons))]
    rows = [line for index, track in enumerate(tracks) for line in row(index, track, lessons)]
    heads = [
        f'<g text-anchor="start">{text(LEFT, 386, "a core, the same tokens at every step", 17, weight=600)}</g>',
        f'<g text-anchor="start">{text(LABEL, 386, "then what you came for", 17, weight=600)}</g>',
    ]
    return "\n".join(['<g text-anchor="middle">', *heads, *steps, *rows, "</g>"])


def files() -> dict[Path, str]:
    return {PICTURE: fill(PICTURE.read_text(encoding="utf-8"), "stages", lower_half())}
