"""Course machinery. Finds the commands quoted on a page: which of them a test runs, which not, and why."""

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
    """A command line on a page. why_not: the page's reason for not running it. exits: the expected exit code."""

    page: Path
    line: int
    text: str
    why_not: str = ""
    exits: int = 0

    @property
    def complaint(self) -> str:
        """Why a test cannot run it, unless the page marks it as not run; otherwise empty."""
        if self.why_not:
            return ""
        if not RUNNABLE.match(self.text) or INSTALLS in self.text:
            return "a test cannot run this command; put <!-- not run: the reason --> on the line before the block"
        if OPERATORS & set(shlex.split(self.text)):
            return "write one command per line, without pipes"
        return ""

    @property
    def arguments(self) -> list[str]:
        """The arguments after `python`."""
        return shlex.split(self.text)[1:]

    @property
    def allowed(self) -> set[int]:
        """The acceptable exit codes. A `check` may be red."""
        return {0, 1} if self.arguments[:3] == ["-m", "lessons", "check"] else {self.exits}


def quoted_commands(page: Page) -> Iterator[Quoted]:
    """Yield the commands in the page's shell blocks, in order."""
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
    """Yield (line within the block, command): comments removed, continued lines joined; in a console the `$` lines."""
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
