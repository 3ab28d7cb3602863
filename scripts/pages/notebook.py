"""Course machinery. Writes site/colab/kv_course.ipynb, the course's first hour on Colab or Kaggle, without outputs.

The exercise's cell holds the file that `lessons start 2` writes, so it follows the lesson.
"""

import json
from pathlib import Path
from typing import Any

from scripts import ROOT

from lessons._course.catalog import choose, read_lessons
from lessons._course.places import Places
from lessons._course.student import starter_of, student_files

FILE = ROOT / "site" / "colab" / "kv_course.ipynb"
REPO = "https://github.com/kv-course/kv-course"
PYTHON = ".venv/bin/python"
EXERCISE = "work/l2/allocator.py"

TITLE = f"""\
# The KV course

Build the KV cache of an LLM inference engine, one idea at a time, and check every token against Hugging Face's.
This notebook sets the course up on a borrowed machine, shows that it runs right there, reports how fast, and opens
lesson 2 with its first exercise. Everything else is in [the repository]({REPO}).

It works without a GPU. With one (*Runtime → Change runtime type* on Colab, *Settings → Accelerator* on Kaggle) lessons
and report use it. On Kaggle, turn *Internet* on: the set-up downloads packages."""
SET_UP = """\
## Set it up

The course's own set-up makes an environment in `.venv`, with the versions that are tested together; with a GPU it is
several gigabytes and takes some minutes."""
SMOKE = """\
## Does it run right?

Each lesson's *smoke script* runs its engine beside Hugging Face's `generate` on the same prompts. Every token must be
the same."""
REPORT = """\
## What is this machine?

The report compares tokens and attention kernels, then measures decode, prefill and prompts with a shared beginning, at
most ten minutes in all. For a first impression in about a minute, set `QUICK`."""
LESSON = f"""\
## Lesson 2: hand out blocks

A request's K and V grow with each token. Reserve room for the longest answer, and most of it is never used. So memory
is handed out in *blocks*: a free list knows which are free. [The lesson's page]({REPO}/tree/main/lessons/l2_token_flat)
has the whole story; here you write its allocator. First, your copy of the lesson's files:"""
WRITE = """\
Write the bodies of `alloc_blocks` (task 2) and `free` (task 3), and run the cell; it saves the file. Which blocks come
first when some were freed? What must a call that fails leave behind?"""
CHECK = """\
The check runs your file against the lesson's tests and explains the first failure. It is red until you have written
something."""
STUCK = "Stuck? Take a hint; each call gives the next one."
END = """\
## Your report

Keep it, or [send it to the course](https://github.com/kv-course/kv-course/issues/new?template=report.yml): machines
that nobody has tried yet are the most welcome. `build/report/report.json` is the file that the form asks for."""

CLONE = f"""\
!git clone -q --depth 1 {REPO}
%cd kv-course"""
INSTALL = """\
# some images have a Python that cannot make environments; then virtualenv makes this one
!python -c "import ensurepip, venv" || (pip install -q virtualenv && python -m virtualenv -q .venv)
!python scripts/setup_env.py"""
RUN_REPORT = f"""\
QUICK = False
!{PYTHON} scripts/report.py {{"--quick" if QUICK else ""}} > /dev/null && echo All parts are right. || echo See below.
"""
SHOW = """\
from pathlib import Path
from IPython.display import Markdown

Markdown(Path("build/report/report.md").read_text(encoding="utf-8"))"""


def cells() -> list[dict[str, Any]]:
    """Return the notebook's cells, each with a descriptive id."""
    return [
        words("title", TITLE),
        words("set-up", SET_UP),
        code("clone", CLONE),
        code("install", INSTALL),
        words("right", SMOKE),
        code("smoke", f"!{PYTHON} scripts/smoke_all.py"),
        words("machine", REPORT),
        code("report", RUN_REPORT.rstrip()),
        words("lesson", LESSON),
        code("start", f"!{PYTHON} -m lessons start 2"),
        words("write", WRITE),
        code("exercise", f"%%writefile {EXERCISE}\n{starter()}"),
        words("red-or-green", CHECK),
        code("check", f"!{PYTHON} -m lessons check 2 --task 2\n!{PYTHON} -m lessons check 2 --task 3"),
        words("stuck", STUCK),
        code("hint", f"!{PYTHON} -m lessons hint 2 2"),
        words("end", END),
        code("page", SHOW),
    ]


def starter() -> str:
    """Return the file of the exercise as `lessons start 2` writes it."""
    places = Places.find()
    lesson = choose(read_lessons(places), "2")
    file = next(file for file in student_files(lesson, places) if file.path.name == Path(EXERCISE).name)
    return starter_of(lesson, file).rstrip()


def words(name: str, text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": lines(text)}


def code(name: str, text: str) -> dict[str, Any]:
    own = {"execution_count": None, "outputs": []}
    return {"cell_type": "code", "id": name, "metadata": {}, "source": lines(text), **own}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook() -> dict[str, Any]:
    """Return the notebook."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells(), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def files() -> dict[Path, str]:
    """Return the text that the notebook should have."""
    return {FILE: json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n"}
