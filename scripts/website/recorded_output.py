"""Course machinery. A Markdown extension for the website: below a Checkpoint's command, what it printed.

The output comes from lessons/checkpoints.json (scripts/pages/checkpoints.py). It is folded, so no script is needed to
show it.
"""

from html import escape

from scripts.pages.checkpoints import recorded
from scripts.website.player_links import BEFORE_HTML
from scripts.website.repo_links import page_path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

BEFORE_FENCES = 40  # superfences takes code blocks away at 25


def folded(output: str) -> str:
    """Return an output as HTML in one line."""
    lines = "".join(f"<span>{escape(line) or ' '}</span>" for line in output.splitlines())
    about = "From a real run. Times are left out, since they differ from machine to machine."
    return (
        '<details class="kv-recorded"><summary>Show its output, as recorded</summary>'
        f'<pre tabindex="0"><code>{lines}</code></pre><p>{about}</p></details>'
    )


class RecordedOutput(Preprocessor):
    """Adds the output to one page."""

    def run(self, lines: list[str]) -> list[str]:
        found = recorded().get((page_path(self.md) or "").split("/")[0])
        heading = "## Checkpoint"
        if not found or heading not in lines or found["command"] not in lines[lines.index(heading) :]:
            return lines
        fence = lines.index(found["command"], lines.index(heading))
        end = lines.index("```", fence) + 1
        return [*lines[:end], "", folded(found["output"]), "", *lines[end:]]


class RecordedOutputExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(RecordedOutput(md), "recorded_output", max(BEFORE_HTML, BEFORE_FENCES) + 1)


def makeExtension(**settings) -> RecordedOutputExtension:
    return RecordedOutputExtension(**settings)
