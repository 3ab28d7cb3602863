"""Course machinery. Collects the facts about an answer that you believe is right and a check refuses.

Checks your files as `python -m lessons check N` does, without touching your progress, and prints Markdown for the issue
form "A check refuses a right answer": versions, the check's output, and the functions of the task in question.
Read it before you send it; nothing is sent by this command.
"""

import argparse
import ast
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.grade import chosen, write
from scripts.grading.checks import copy_sources, verdict_of

from lessons._course.catalog import Lesson
from lessons._course.cli import seconds
from lessons._course.commit import changed_files, git
from lessons._course.limits import TOTAL_SECONDS
from lessons._course.places import CourseError, Places
from lessons._course.starter import find_function
from lessons._course.student import student_files
from lessons._course.verdict import need_files
from mini_engine import __version__
from mini_engine.base.errors import UserError
from mini_engine.cli.parser import OneLineParser, description, guard

PACKAGES = ("torch", "transformers", "pytest", "hypothesis")
FORM = "https://github.com/kv-course/kv-course/issues/new?template=refused-answer.yml"
NOTHING_REFUSED = {
    "passed": "the lesson passes",
    "done": "its task passes",
    "not_written": "the next task is not written yet",
}


def collect(lesson: Lesson, places: Places, limit: float) -> dict[str, Any]:
    """Check a copy of the student's files and return the facts for a reader of the issue.

    Raises:
        UserError: there is nothing to check, or nothing is refused.
    """
    try:
        need_files(student_files(lesson, places), lesson, places)
    except CourseError as error:
        raise UserError(str(error)) from None
    with TemporaryDirectory(prefix="kv-refused-", ignore_cleanup_errors=True) as work:
        folder = f"l{lesson.number}"
        copy_sources(places.work / folder, Path(work) / folder)
        verdict = verdict_of(lesson, places, Path(work), limit)
    if isinstance(verdict, str):
        raise UserError(verdict)
    result = verdict["result"]
    if result["status"] in NOTHING_REFUSED:
        raise UserError(f"lesson {lesson.number}: {NOTHING_REFUSED[result['status']]}, so no answer is refused")
    return {
        "lesson": lesson.number,
        "task": result["task"],
        "machine": machine(places),
        "result": result,
        "says": [verdict["advice"]["headline"], *verdict["advice"]["lines"]],
        "answer": answer(lesson, places, result["task"]),
    }


def machine(places: Places) -> dict[str, str]:
    """Return versions, and the course's own files that differ from its commit."""
    found = {"course": __version__, "commit": git(places.root, "rev-parse", "--short", "HEAD") or "unknown"}
    found["changed"] = ", ".join(changed_files(places.root)) or "nothing"
    found["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def answer(lesson: Lesson, places: Places, task: int | None) -> str:
    """Return the student's functions of a task, or of all tasks; the whole file if Python cannot read it."""
    parts = []
    for file in student_files(lesson, places):
        symbols = [name for name, of in lesson.tasks_in(file.module).items() if task in (None, of.number)]
        try:
            tree, lines = ast.parse(file.source), file.source.splitlines()
            nodes = [find_function(tree, symbol) for symbol in symbols]
        except (SyntaxError, ValueError):
            parts.append(f"# {file.path.name}\n{file.source}")
            continue
        parts += ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]
    return "\n\n".join(parts)


def markdown(found: dict[str, Any]) -> str:
    """Return the issue's text."""
    task = f", task {found['task']}" if found["task"] else ""
    rows = [f"| {name} | {value} |" for name, value in found["machine"].items()]
    says, code = "\n".join(found["says"]), found["answer"]
    table = ["| | |", "| --- | --- |", *rows]
    return "\n".join(
        [f"### Lesson {found['lesson']}{task}", "", *table, "", *fenced("text", says), "", *fenced("python", code), ""]
    )


def fenced(language: str, text: str) -> list[str]:
    """Return a code block whose fence does not occur in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [fence + language, text, fence]


def run(args: argparse.Namespace) -> int:
    places = Places.find()
    lessons = chosen(places, args.number)
    if len(lessons) != 1:
        raise UserError(f"{args.number!r} are several lessons; give one")
    found = collect(lessons[0], places, args.time_limit)
    text = json.dumps(found, indent=2) + "\n" if args.json else markdown(found)
    if args.out:
        write(args.out, text)
        print(f"Written: {args.out}. Read it, then paste it into {FORM}", file=sys.stderr)
    else:
        print(text, end="")
        print(f"\nRead it, then paste it into {FORM}", file=sys.stderr)
    return 0


def main(argv=None) -> int:
    parser = OneLineParser(prog="python scripts/refused.py", description=description(__doc__))
    parser.add_argument("number", metavar="N", help="the lesson's number")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it to a file instead")
    parser.add_argument(
        "--time-limit", type=seconds, default=TOTAL_SECONDS, metavar="SECONDS", help="default: %(default).0f"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of Markdown")
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
