"""Course machinery. The commands that a page quotes: which are run by a test, which are not, and why."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lessons._course.pages import Block, Page

SHELLS = {"bash", "sh", "shell", "console"}
NOT_RUN = re.compile(r"not run: (?P<reason>\S.*)")
EXITS = re.compile(r"exits (?P<code>\d+)\b")
RUNNABLE = re.compile(r"python (scripts/\w+\.py|-m (lessons|mini_engine|pytest|timeit|scripts\.\w+\.\w+)|-c)( |$)")
INSTALLS = "scripts/setup_env.py"
OPERATORS = {"|", "||", ";", "&", ">", ">>", "<"}


@dataclass(frozen=True)
class Quoted:
    """A command line of a page. why_not: the page's reason that it is not run. exits: the exit code it must have."""

    page: Path
    line: int
    text: str
    why_not: str = ""
    exits: int = 0

    @property
    def complaint(self) -> str:
        """What keeps a test from running it, unless the page says that it is not run."""
        if self.why_not:
            return ""
        if not RUNNABLE.match(self.text) or INSTALLS in self.text:
            return "a test cannot run this; put <!-- not run: the reason --> on the line before the block"
        if OPERATORS & set(shlex.split(self.text)):
            return "write one command a line, without pipes"
        return ""

    @property
    def arguments(self) -> list[str]:
        """What follows `python`."""
        return shlex.split(self.text)[1:]

    @property
    def allowed(self) -> set[int]:
        """The exit codes that are right: a check may be red."""
        return {0, 1} if self.arguments[:3] == ["-m", "lessons", "check"] else {self.exits}


def quoted_commands(page: Page) -> Iterator[Quoted]:
    """The commands of the page's shell blocks, in order."""
    for block in page.blocks:
        if block.language in SHELLS:
            why_not, exits = NOT_RUN.match(block.comment), EXITS.match(block.comment)
            for offset, text in command_lines(block):
                yield Quoted(
                    page.path,
                    block.line + offset,
                    text,
                    why_not["reason"] if why_not else "",
                    int(exits["code"]) if exits else 0,
                )


def command_lines(block: Block) -> Iterator[tuple[int, str]]:
    """(line within the block, command): comments cut off, continued lines joined, of a console the `$` lines."""
    lines = enumerate(block.lines, 1)
    for number, line in lines:
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        while line.endswith("\\"):
            line = line[:-1].rstrip() + " " + next(lines)[1].strip()
        line = re.sub(r"(^|\s+)#\s.*$", "", line).strip()
        if line:
            yield number, line
