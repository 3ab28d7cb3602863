"""Course machinery. A Markdown extension for the website: the picture beside a text shows the frame that it describes.

scripts/traces/followed.py describes the comments that bind a page's paragraphs to a trace's frames. They become a
section of steps with an empty box beside it, into which follow.js puts a player. Where scripts do not run, each step
has a still: a view of one file with all of the section's frames, which scripts/traces/pictures.py draws.
"""

import json
import logging
import re
from html import escape
from pathlib import Path

from scripts import ROOT
from scripts.traces.followed import CLOSE, OPEN, STEP, Section, sections
from scripts.traces.pictures import stills_path
from scripts.traces.tape import read_trace
from scripts.website.player_links import BEFORE_HTML, addresses, codes
from scripts.website.repo_links import DOCS, page_path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

VIEW = re.compile(r'<view id="frame-(\d+)" viewBox="\S+ \S+ (\S+) (\S+)"/>')
log = logging.getLogger("mkdocs.follow")


class Follow(Preprocessor):
    """Turns the comments of one page into elements."""

    def run(self, lines: list[str]) -> list[str]:
        page = page_path(self.md)
        found = iter(sections("\n".join(lines)) if page else ())
        done, inside = [], False
        for line in lines:
            if page and OPEN.fullmatch(line):
                shown = Shown(self.md, page, next(found))
                done += shown.begin()
            elif page and (step := STEP.fullmatch(line)):
                done += [*(["</div>", ""] if inside else []), *shown.step(int(step["index"])), ""]
                inside = True
            elif page and line == CLOSE:
                done += [*(["</div>", ""] if inside else []), "</div>", "</div>"]
                inside = False
            else:
                done.append(line)
        return done


class Shown:
    """One section of a page, as HTML."""

    def __init__(self, md: Markdown, page: str, section: Section) -> None:
        path = (ROOT / DOCS / page).parent / section.file
        frames = read_trace(path.read_text(encoding="utf-8"))["frames"]
        stills = stills_path(path)
        drawn = VIEW.findall(stills.read_text(encoding="utf-8")) if stills.is_file() else []
        self.file, self.frames, self.stills = section.file, frames, f"{Path(section.file).with_name(stills.name)}"
        self.sizes = {int(index): (width, height) for index, width, height in drawn}
        self.places = json.dumps(addresses(md, page, path.name, codes(path)))
        for complaint in section.complaints(frames) + self.missing(section):
            log.warning("Doc file '%s' follows a trace: %s.", page, complaint)

    def missing(self, section: Section) -> list[str]:
        without = [index for index, _ in section.steps if index not in self.sizes]
        return [f"no still of frame {index} is drawn: python -m scripts.traces.record" for index in without]

    def begin(self) -> list[str]:
        about = f'data-file="{self.file}" data-code="{escape(self.places)}"'
        opened = f'<div class="kv-follow" {about} markdown="1">'
        return [opened, '<div class="kv-beside"></div>', "", '<div class="kv-steps" markdown="1">', ""]

    def step(self, index: int) -> list[str]:
        """Return a step's beginning. Its still's file holds all frames, so a page without scripts loads it once."""
        begin = f'<div class="kv-step" data-frame="{index}" markdown="1">'
        if index not in self.sizes:
            return [begin]
        width, height = self.sizes[index]
        size = f'width="{width}" height="{height}" style="aspect-ratio: {width} / {height}"'
        still = f'<img class="kv-still" src="{self.stills}#frame-{index}" {size} alt="{escape(self.say(index))}">'
        return [begin, f"<noscript>{still}</noscript>"]

    def say(self, index: int) -> str:
        return self.frames[index]["say"]


class FollowExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Follow(md), "follow", BEFORE_HTML)


def makeExtension(**settings) -> FollowExtension:
    return FollowExtension(**settings)
