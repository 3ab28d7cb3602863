"""Course machinery. Keeps the exercise in site/colab/kv_course.ipynb, the course's first hour on Colab or Kaggle.

The notebook is written by hand and has no outputs; the exercise's cell holds the file that `lessons start 2` writes.
"""

import json
from pathlib import Path

from scripts import ROOT

from lessons._course.catalog import choose, read_lessons
from lessons._course.places import Places
from lessons._course.student import starter_of, student_files

FILE = ROOT / "site" / "colab" / "kv_course.ipynb"
REPO = "https://github.com/kv-course/kv-course"
EXERCISE = "work/l2/allocator.py"


def starter() -> str:
    """Return the file of the exercise as `lessons start 2` writes it."""
    places = Places.find()
    lesson = choose(read_lessons(places), "2")
    file = next(file for file in student_files(lesson, places) if file.path.name == Path(EXERCISE).name)
    return starter_of(lesson, file).rstrip()


def files() -> dict[Path, str]:
    """Return the text that the notebook should have."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    for cell in found["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"execution_count": None, "outputs": []}
        if cell["id"] == "exercise":
            cell["source"] = f"%%writefile {EXERCISE}\n{starter()}".splitlines(keepends=True)
    return {FILE: json.dumps(found, indent=1, ensure_ascii=False) + "\n"}
