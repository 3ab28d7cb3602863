"""Course machinery. Times `check` and the smoke script of each lesson on this machine, with all tasks done.

The reference is checked in place of a student's files, so this is the time for checking a correct solution.
"""

import json
import sys

from scripts.smoke.processes import run_all
from scripts.smoke_all import pick_lessons

from lessons._course.catalog import Lesson
from lessons._course.checker import Check
from lessons._course.order import plan_of
from lessons._course.places import CourseError, Places
from lessons._course.runner import Spawned
from mini_engine.base.errors import UserError
from mini_engine.cli.parser import OneLineParser, guard


def measure(lesson: Lesson, places: Places) -> dict[str, object]:
    """Time one lesson: its check (tests and smoke script), and the smoke script once more alone."""
    plan = plan_of(lesson, [task.number for task in lesson.tasks], set())
    report = Check(lesson, places, files=[], plan=plan).run()
    [smoke] = run_all([lesson], places, Spawned, jobs=1)
    return {
        "lesson": lesson.number,
        "title": lesson.title,
        "minutes": lesson.minutes,
        "tests": len(report.results),
        "passed": report.passed and smoke.ok,
        "check_seconds": round(report.seconds, 1),
        "smoke_seconds": round(smoke.seconds, 1),
    }


def run(args) -> int:
    """Measure and print. Returns 1 if a lesson did not pass."""
    places = Places.find()
    try:
        lessons = pick_lessons(places, args.only)
    except CourseError as error:
        raise UserError(str(error)) from None
    found = []
    for lesson in lessons:
        found.append(measure(lesson, places))
        if not args.json:
            row = found[-1]
            head = f"{row['lesson']:2d}: {'passed' if row['passed'] else 'FAILED'}, {row['tests']:3d} tests"
            print(f"{head}, check {row['check_seconds']:5.1f} s, smoke {row['smoke_seconds']:5.1f} s", flush=True)
    if args.json:
        print(json.dumps(found))
    return 0 if all(row["passed"] for row in found) else 1


def main(argv=None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="0,1", help="only these lessons")
    parser.add_argument("--json", action="store_true", help="print one JSON array instead of lines")
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
