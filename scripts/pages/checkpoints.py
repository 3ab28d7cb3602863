"""Course machinery. Records what the command of each lesson's Checkpoint prints, for its page to show.

`python -m scripts.pages.checkpoints` runs the smoke scripts and writes lessons/checkpoints.json; with numbers of
lessons, only these. Numbers that differ from run to run, times and processes, are replaced by an ellipsis.
"""

import argparse
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from scripts import ROOT, first_line

from lessons._course.catalog import Lesson, read_lessons
from lessons._course.places import Places

RECORDED = ROOT / "lessons" / "checkpoints.json"
FIRST, LAST = 16, 32  # lines of a longer output
VARIES = re.compile(r"\d[\d,]*(?:\.\d+)?(?= (?:ms|s|tokens/s|MB/s|GB/s)\b)|(?<=process )\d+")


def command_of(page: str) -> str:
    """Return the first command of a page's Checkpoint that runs its smoke script."""
    section = page.partition("\n## Checkpoint\n")[2].partition("\n## ")[0]
    found = re.search(r"^python scripts/l\d+_smoke\.py.*$", section, re.MULTILINE)
    if not found:
        raise ValueError("the page's Checkpoint runs no smoke script")
    return found[0]


def masked(output: str) -> str:
    """Return what every machine prints; of a long output its beginning and its end."""
    text = output.replace(f"{ROOT}{os.sep}", "").replace("\r\n", "\n")
    lines = [VARIES.sub("…", line).rstrip() for line in text.strip().splitlines()]
    left = len(lines) - FIRST - LAST
    return "\n".join(lines if left < 2 else [*lines[:FIRST], f"… {left} more lines …", *lines[-LAST:]])


def printed(command: str) -> str:
    """Run a command, and return what it prints."""
    _, *arguments = shlex.split(command)
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    return masked(done.stdout)


def record(lessons: Sequence[Lesson]) -> None:
    """Run these lessons' commands, and keep what they print, each as soon as it has ended."""
    for lesson in lessons:
        command = command_of(lesson.page.read_text(encoding="utf-8"))
        found = {"command": command, "output": printed(command)}
        known = recorded() | {lesson.id: found}
        text = json.dumps(dict(sorted(known.items())), indent=2, ensure_ascii=False)
        RECORDED.write_text(text + "\n", encoding="utf-8", newline="\n")
        print(f"lesson {lesson.number}: {found['output'].splitlines()[-1]}", flush=True)


def recorded() -> dict[str, dict[str, str]]:
    """Return the recorded command and output of each lesson."""
    return parsed(RECORDED.stat().st_mtime_ns) if RECORDED.exists() else {}


@functools.lru_cache(maxsize=1)
def parsed(stamp: int) -> dict[str, dict[str, str]]:
    """Read the file once for all pages of a build. stamp: when it was written."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=first_line(__doc__).removeprefix("Course machinery. "))
    parser.add_argument("numbers", nargs="*", type=int, metavar="LESSON", help="numbers of lessons; default: all")
    numbers = parser.parse_args(argv).numbers
    record([lesson for lesson in read_lessons(Places.find()) if lesson.number in (numbers or range(100))])
    return 0


if __name__ == "__main__":
    sys.exit(main())
