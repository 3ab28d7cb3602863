"""Course machinery. Grades students' submissions: points for each task, for one student or a whole class.

Give the folders that were handed in, `work` or one that contains it. A copy of each is checked with this checkout's own
tests; the progress file and the use of hints and solutions do not count. It runs the students' code, so run it in a
container or under an account without privileges.
"""

import argparse
import glob
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.grading.checks import grade
from scripts.grading.formats import as_json, markdown, totals
from scripts.grading.points import Graded
from scripts.grading.view import counted, show_class

from lessons._course.catalog import Lesson, choose, read_lessons
from lessons._course.cli import seconds
from lessons._course.handed_in import work_folder
from lessons._course.limits import TOTAL_SECONDS
from lessons._course.places import CourseError, Places
from mini_engine.base.errors import UserError
from mini_engine.cli.parser import OneLineParser, description, guard


def chosen(places: Places, names: str) -> list[Lesson]:
    """Return the lessons of a list such as "0,2".

    Raises:
        UserError: one of them does not exist, or the list is empty.
    """
    known = read_lessons(places)
    try:
        lessons = [choose(known, name.strip()) for name in names.split(",") if name.strip()]
    except CourseError as error:
        raise UserError(str(error)) from None
    if not lessons:
        raise UserError(f"--lessons is {names!r}; give at least one lesson's number, as in --lessons 0,2")
    return lessons


def student_of(folder: Path) -> str:
    """Return the folder's owner: ada for handed-in/ada/work and handed-in/ada."""
    path = folder.resolve()
    return path.parent.name if path.name == "work" else path.name


def expanded(paths: Sequence[Path]) -> list[Path]:
    """Expand patterns to folders; on Windows the shell leaves handed-in/* to the program."""
    found = []
    for path in paths:
        is_pattern = glob.has_magic(str(path)) and not path.exists()
        found += sorted(map(Path, glob.glob(str(path)))) if is_pattern else [path]  # noqa: PTH207 (may be absolute)
    return found or list(paths)


def write(path: Path, text: str, *, more: bool = False) -> None:
    """Write or append a file; an unwritable one is a user's mistake."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if more else "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def run(args: argparse.Namespace) -> int:
    """Grade everyone. Returns 1 if a student has fewer points than --fail-under asks for."""
    places = Places.find()
    lessons = chosen(places, args.lessons)
    paths = expanded(args.folders)
    folders = {student_of(path): work_folder(path) for path in paths}
    if len(folders) < len(paths):
        raise UserError("two of the folders belong to students of the same name; rename one of them")
    jobs = [(student, work, lesson) for student, work in folders.items() for lesson in lessons]
    found: dict[str, list[Graded]] = {student: [] for student in folders}
    for student, work, lesson in counted(jobs, lambda job: f"{job[0]}, lesson {job[2].number}"):
        found[student].append(grade(lesson, places, work, args.time_limit, args.core))
    if args.summary:
        alone = len(found) == 1
        write(args.summary, "\n".join(markdown(one, "" if alone else who) for who, one in found.items()), more=True)
    told = json.dumps({student: as_json(one) for student, one in found.items()}, indent=2) + "\n"
    if args.json_file:
        write(args.json_file, told)
    print(told, end="") if args.json else show_class(found)
    few = [who for who, one in found.items() if 100 * totals(one)[0] < args.fail_under * totals(one)[1]]
    if few and args.fail_under:
        print(f"less than {args.fail_under} %: {', '.join(few)}", file=sys.stderr)
    return 1 if few else 0


def percent(text: str) -> int:
    """Parse a percentage (an argparse type)."""
    if not text.isdecimal() or int(text) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage; give a whole number from 0 to 100")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python scripts/grade.py", description=description(__doc__))
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a student's submission")
    parser.add_argument("--lessons", required=True, metavar="0,2", help="the lessons to grade")
    parser.add_argument("--core", action="store_true", help="only the tasks of the lessons' core count")
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=TOTAL_SECONDS,
        metavar="SECONDS",
        help="for each check (default: %(default).0f)",
    )
    parser.add_argument(
        "--summary", type=Path, metavar="FILE", help="append tables in Markdown, as for $GITHUB_STEP_SUMMARY"
    )
    parser.add_argument("--json-file", type=Path, metavar="FILE", help="write everything as one JSON object")
    parser.add_argument(
        "--fail-under",
        type=percent,
        default=0,
        metavar="PERCENT",
        help="exit with 1 if a student has less (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def main(argv=None) -> int:
    return guard(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
