"""Course machinery. The core and the tracks of electives, from `lessons/tracks.toml`: the one place that says them."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from lessons._course.catalog import Lesson
from lessons._course.places import CourseError, Places


@dataclass(frozen=True)
class Track:
    """The core, or one of the tracks of electives. lessons: their numbers, in the order in which to take them."""

    id: str
    title: str
    idea: str
    lessons: tuple[int, ...]

    def of(self, lessons: Sequence[Lesson]) -> list[Lesson]:
        return [lesson for number in self.lessons for lesson in lessons if lesson.number == number]


def read_tracks(places: Places) -> list[Track]:
    """Return the core and the other tracks.

    Raises:
        CourseError: a lesson is in two tracks.
    """
    raw = tomllib.loads((places.lessons / "tracks.toml").read_text(encoding="utf-8"))
    tracks = [Track(name, one["title"], one["idea"], tuple(one["lessons"])) for name, one in raw.items()]
    numbers = [number for track in tracks for number in track.lessons]
    twice = {number for number in numbers if numbers.count(number) > 1}
    if twice:
        raise CourseError(f"lesson {min(twice)} is in two tracks of lessons/tracks.toml")
    return tracks
