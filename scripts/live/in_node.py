"""Course machinery. A page's Python in Node: the same WebAssembly, without a browser's weight."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from scripts import ROOT
from scripts.website import live

from lessons._course.catalog import Lesson
from lessons._course.places import Places
from lessons._course.student import starter_of, student_files

TEST_SECONDS = 300.0  # Node's clock runs on while the machine does other work


def is_there() -> bool:
    """Return whether this machine has Node, and the files that `python -m scripts.website.live` fetches."""
    return live.is_complete() and shutil.which("node") is not None


class PagePython:
    """Answers a page's questions until it is closed."""

    def __init__(self) -> None:
        live.pack()
        command = ["node", str(ROOT / "scripts/live/node.mjs"), str(live.FOLDER.parent)]
        self.node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
        self.ask("prepare")

    def ask(self, kind: str, **question: Any) -> Any:
        assert self.node.stdin and self.node.stdout
        self.node.stdin.write(json.dumps({"kind": kind, "question": question}) + "\n")
        self.node.stdin.flush()
        said = self.node.stdout.readline()
        assert said, "Python stopped"
        return json.loads(said)["answer"]

    def check(self, lesson: Lesson, task: int, source: str) -> dict[str, Any]:
        """Return the page's verdict on a task's module."""
        return self.ask("check", lesson=lesson.id, tasks=[task], source=source, seconds=TEST_SECONDS)[0]

    def close(self) -> None:
        self.node.kill()
        self.node.communicate()


def ends(lesson: Lesson, group: list[int], task: int) -> Iterator[tuple[str, str, str]]:
    """Yield what an exercise begins and ends with: its name, the module's text, and the status that it must have."""
    files = student_files(lesson, Places(ROOT, ROOT / "work"))
    file = next(file for file in files if file.module == lesson.task(task).targets[0].file)
    before = group[: group.index(task)]
    yield "the starter", starter_of(lesson, file, before), "not_written"
    yield "the reference", starter_of(lesson, file, [*before, task]), "done"
