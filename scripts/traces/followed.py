"""Course machinery. Which frames of a trace a page's text follows: the comments that bind paragraphs to frames.

A lesson's section may follow a trace: while it is read, a picture beside it shows the frame that each part describes.
`<!-- follow: pool.trace.js -->` opens such a section, `<!-- frame: 12 BlockAllocator.free -->` stands before what
describes frame 12, counted from 0 and made by that function, and `<!-- end of follow -->` closes it. On GitHub none of
this is seen. The website's extension is scripts/website/follow.py.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OPEN = re.compile(r"<!-- follow: (?P<file>[\w./-]+\.trace\.js) -->")
STEP = re.compile(r"<!-- frame: (?P<index>\d+) (?P<code>[\w.]+) -->")
CLOSE = "<!-- end of follow -->"


@dataclass
class Section:
    """A section that follows a trace. file: the trace's, relative to the page. steps: frames and their functions."""

    file: str
    steps: list[tuple[int, str]] = field(default_factory=list)

    def complaints(self, frames: list[dict[str, Any]]) -> list[str]:
        """Return how the section and the trace's frames disagree."""
        found = []
        for index, code in self.steps:
            if index >= len(frames):
                found.append(f"frame {index} does not exist: {self.file} has {len(frames)}, from 0")
            elif frames[index].get("code", "").rpartition("::")[2] != code:
                made = frames[index].get("code", "").rpartition("::")[2]
                found.append(f"frame {index} of {self.file} was made by {made}, not by {code}: what does it show now?")
        return found


def sections(text: str) -> list[Section]:
    """Return the sections of a page that follow a trace.

    Raises:
        ValueError: a comment is out of place.
    """
    found: list[Section] = []
    is_open = False
    for line in text.split("\n"):
        if opened := OPEN.fullmatch(line):
            if is_open:
                raise ValueError(f"{line} inside a section that follows a trace already: close that with {CLOSE}")
            found.append(Section(opened["file"]))
            is_open = True
        elif step := STEP.fullmatch(line):
            if not is_open:
                raise ValueError(f"{line} outside a section: open one with <!-- follow: x.trace.js -->")
            found[-1].steps.append((int(step["index"]), step["code"]))
        elif line == CLOSE:
            if not is_open:
                raise ValueError(f"{CLOSE} without a beginning")
            is_open = False
    if is_open:
        raise ValueError(f"the section that follows {found[-1].file} has no end: {CLOSE}")
    return found


def followed_frames(trace: Path) -> list[int]:
    """Return the frames of a trace, in rising order, that the page beside it follows."""
    page = trace.with_name("README.md")
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    return sorted({index for one in sections(text) if one.file == trace.name for index, _ in one.steps})
