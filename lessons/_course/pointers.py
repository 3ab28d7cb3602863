"""Course machinery. Points at lines of the student's files, and names the commands to type next."""

import re
from collections.abc import Sequence

from lessons._course.attribution import Blame
from lessons._course.catalog import Lesson
from lessons._course.places import COMMAND, Places
from lessons._course.report import Failure
from lessons._course.student import StudentFile, line_of


class Pointers:
    """Knows the lesson, where things are, and the student's files."""

    def __init__(self, lesson: Lesson, places: Places, files: Sequence[StudentFile]) -> None:
        self.lesson, self.places, self.files = lesson, places, files

    def after_red(self, blame: Blame | None) -> list[str]:
        """Return what to type after a failure that belongs to `blame`."""
        if blame is None:
            return [self.command("watch", "   # again at each save")]
        number = blame.task.number
        alone = self.command("check", f"--task {number}    # only this task's tests")
        return [
            *([] if blame.is_seen_elsewhere else [alone]),
            self.command("watch", "            # again at each save"),
            self.command("hint", number),
        ]

    def command(self, name: str, rest: object = "") -> str:
        """Return a command of this lesson, with `rest` behind its number."""
        return f"{COMMAND} {name} {self.lesson.number} {rest}".rstrip()

    def place(self, blame: Blame) -> str:
        """Return where the student's file defines the function that is to blame, or else the task's first one."""
        targets = blame.task.targets
        target = next((each for each in targets if each.symbol == blame.symbol), targets[0])
        file = next(file for file in self.files if file.module == target.file)
        return self.shown(file.path, line_of(file, target.symbol))

    def shown(self, path, line: int) -> str:
        """Return `path:line`; only the path if the line is 0."""
        return self.places.shown(path) + (f":{line}" if line else "")

    def student_line(self, failure: Failure | None) -> str:
        """Return the innermost line of the student's code in the failure's traceback."""
        mine = {str(file.path) for file in self.files}
        if failure and failure.syntax and failure.syntax[0] in mine:
            return self.shown(failure.syntax[0], failure.syntax[1])
        for path, line, name, text in reversed(failure.frames if failure else []):
            if path in mine:
                inside = f" in {name}" if name != "<module>" else ""
                return f"{self.shown(path, line)}{inside}" + (f":  {text}" if text else "")
        return ""

    def named_in(self, text: str) -> str:
        """Return the last line of the student's code that a traceback names."""
        for file in self.files:
            found = re.findall(rf"{re.escape(file.path.name)}\"?(?::|, line )(\d+)", text)
            if found:
                return f"{self.places.shown(file.path)}:{found[-1]}"
        return ""
