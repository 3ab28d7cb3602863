"""Course machinery. Grades one submission and writes the results file that a grading system reads.

For systems that call a script: Gradescope (results.json), Classroom 50 (result.json), or any other that reads JSON.
Each format has its usual places for the submission and the results; both can be given. Needs no network once the course
is set up. For a class without such a system there is scripts/grade.py.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.grade import chosen, write
from scripts.grading.checks import grade
from scripts.grading.formats import as_json, classroom50, gradescope, totals
from scripts.grading.points import Graded
from scripts.grading.view import counted

from lessons._course.cli import seconds
from lessons._course.handed_in import work_folder
from lessons._course.limits import TOTAL_SECONDS
from lessons._course.places import Places
from mini_engine.cli.parser import OneLineParser, description, guard


class Format(NamedTuple):
    """A grading system's format: how it reads results, and its folders for the submission and the results."""

    make: Callable[[Sequence[Graded]], dict[str, Any]]
    submission: str
    results: str


FORMATS = {
    "gradescope": Format(gradescope, "/autograder/submission", "/autograder/results/results.json"),
    "classroom50": Format(classroom50, ".", "result.json"),
    "plain": Format(as_json, ".", "points.json"),
}


def run(args: argparse.Namespace) -> int:
    """Grade and write the results. Returns 0 whatever the points, which are in the file."""
    form, places = FORMATS[args.format], Places.find()
    lessons = chosen(places, args.lessons)
    work = work_folder(args.submission or Path(form.submission))
    results = args.results or Path(form.results)
    jobs = counted(lessons, lambda lesson: f"lesson {lesson.number}")
    found = [grade(lesson, places, work, args.time_limit, args.core) for lesson in jobs]
    write(results, json.dumps(form.make(found), indent=2) + "\n")
    points, most = totals(found)
    print(f"{points} of {most} points, in {results}")
    return 0


def main(argv=None) -> int:
    parser = OneLineParser(prog="python scripts/autograder.py", description=description(__doc__))
    parser.add_argument("--lessons", required=True, metavar="0,2", help="the lessons to grade")
    parser.add_argument("--core", action="store_true", help="only the tasks of the lessons' core count")
    parser.add_argument("--format", choices=FORMATS, default="gradescope", help="grading system (default: %(default)s)")
    parser.add_argument(
        "--submission", type=Path, metavar="FOLDER", help="default: /autograder/submission, or the current folder"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="default: where the system looks for it")
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=TOTAL_SECONDS,
        metavar="SECONDS",
        help="for each check (default: %(default).0f)",
    )
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
