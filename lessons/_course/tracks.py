"""Course machinery. The core, the tracks of electives and the plans: all from `lessons/tracks.toml`."""

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


@dataclass(frozen=True)
class Plan:
    """What fits into some hours: lessons whose core is done, pages that are only read, electives to choose from."""

    hours: int
    lessons: tuple[int, ...]
    read: tuple[int, ...] = ()
    then: tuple[int, ...] = ()


@dataclass(frozen=True)
class Syllabus:
    """The tracks, the core first, and the plans, the longest last."""

    tracks: tuple[Track, ...]
    plans: tuple[Plan, ...] = ()

    @property
    def core(self) -> Track:
        return self.tracks[0]

    @property
    def first_elective(self) -> int | None:
        """The elective to recommend after the core."""
        return next(iter(self.plans[-1].then), None) if self.plans else None

    def track_of(self, number: int) -> Track:
        return next(track for track in self.tracks if number in track.lessons)

    def place(self, number: int) -> tuple[bool, bool, int, int]:
        """Return a sort key: the core, then the elective to recommend, then track by track."""
        track = self.track_of(number)
        index = self.tracks.index(track)
        return index > 0, number != self.first_elective, index, track.lessons.index(number)


def read_syllabus(places: Places, lessons: Sequence[Lesson]) -> Syllabus:
    """Return the tracks and plans. Lessons that the file does not name are a last track.

    Raises:
        CourseError: a lesson is in two tracks.
    """
    raw = tomllib.loads((places.lessons / "tracks.toml").read_text(encoding="utf-8"))
    tracks = [
        Track(name, one["title"], one["idea"], tuple(one["lessons"])) for name, one in raw.get("tracks", {}).items()
    ]
    numbers = [number for track in tracks for number in track.lessons]
    twice = {number for number in numbers if numbers.count(number) > 1}
    if twice:
        raise CourseError(f"lesson {min(twice)} is in two tracks of lessons/tracks.toml")
    others = tuple(lesson.number for lesson in lessons if lesson.number not in numbers)
    if others:
        tracks.append(Track("others", "Others", "lessons of no track", others))
    plans = [
        Plan(one["hours"], *(tuple(one.get(key, ())) for key in ("lessons", "read", "then")))
        for one in raw.get("plans", ())
    ]
    return Syllabus(tuple(tracks), tuple(plans))
