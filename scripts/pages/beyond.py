"""Course machinery. The ladder's second picture: the gains of lessons 10 to 20, each by its own measure.

Every figure is read from the lesson's page, which gives its command.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from scripts import ROOT
from scripts.bench.plot import BAR, BAR_INK, INK, LINE, MUTED, canvas, drawn

LESSONS = ROOT / "lessons"
PICTURE = LESSONS / "ladder" / "beyond.svg"
WIDTH, ROW, TOP, BOTTOM = 300, 40, 6, 32  # in points; a phone shows all of it
NAME, FIRST, ROOM = 30, 150, 84  # where words and bars begin, and a whole bar


@dataclass(frozen=True)
class Gain:
    """The gain of one lesson: a measure, and patterns in the lesson's page whose groups are its figures."""

    folder: str
    name: str
    before: str
    after: str
    unit: str = ""

    @property
    def number(self) -> str:
        return self.folder.partition("_")[0].removeprefix("l")

    @property
    def figures(self) -> tuple[str, str]:
        """Return the figures before and after, as written on the page.

        Raises:
            ValueError: the page does not have a pattern exactly once.
        """
        page = (LESSONS / self.folder / "README.md").read_text(encoding="utf-8")
        return find(page, self.before), find(page, self.after)

    def said(self, figure: str) -> str:
        return f"{figure} {self.unit}".strip()


def find(page: str, pattern: str) -> str:
    found = re.findall(pattern, page)
    if len(found) != 1:
        raise ValueError(f"{len(found)} places of the page are “{pattern}”; one is expected")
    return "1" if found[0] == "one" else found[0]


def number(figure: str) -> float:
    return float(figure.replace(",", ""))


GAINS = (
    Gain(
        "l10_device",
        "the host's share of a\nstep, timed on a CPU",
        r"28 layers, one sequence, plain \| 1,379 \| ([\d.]+) \|",
        r"28 layers, one sequence, replayed \| 33 \| ([\d.]+) \|",
        "ms",
    ),
    Gain(
        "l11_hybrid",
        "memory of one text of\n65,536 tokens",
        r"\| 65,536 \| ([\d,]+) \| [\d,]+ \|",
        r"\| 65,536 \| [\d,]+ \| ([\d,]+) \|",
        "MiB",
    ),
    Gain(
        "l12_tiers",
        "first token of 4,096,\nafter a restart",
        r"nowhere: computed \| ([\d.]+) s",
        r"page cache dropped \| ([\d.]+) s",
        "s",
    ),
    Gain(
        "l13_machines",
        "blocks found cached\nby four replicas",
        r"4 × 3,000 \| ([\d.]+) % \| \*\*",
        r"4 × 3,000 \| [\d.]+ % \| \*\*([\d.]+) %\*\*",
        "%",
    ),
    Gain(
        "l14_speculation",
        "tokens a step while a\ntext is edited",
        r"engine without guesses makes (one) token a step on both",
        r"This lesson's makes ([\d.]+) tokens a step on the edited text",
    ),
    Gain(
        "l15_windows",
        "requests at once, of\n65,536 tokens each",
        r"\| 65,536 \| (\d+) \| \d+ \| 1\.0",
        r"\| 65,536 \| \d+ \| (\d+) \| 1\.0",
    ),
    Gain(
        "l16_latents",
        "requests at once in\n16 MiB of pool",
        r"\| pocket \| 3,072 \| (\d+) \|",
        r"\| pocket-latent \| 1,152 \| (\d+) \|",
    ),
    Gain(
        "l17_bits",
        "tokens in 1 GiB, with\n16 and with 4 bits",
        r"0\.6B's shape \| ([\d,]+) \| [\d,]+ \| [\d,]+ \|",
        r"0\.6B's shape \| [\d,]+ \| [\d,]+ \| ([\d,]+) \|",
    ),
    Gain(
        "l18_ranks",
        "weights in each of\ntwo processes",
        r"holds [\d.]+ MiB of weights instead of ([\d,]*\d)",
        r"holds ([\d.]+) MiB of weights instead of [\d,]+",
        "MiB",
    ),
    Gain(
        "l19_handover",
        "largest gap of answers\nbeside a long prompt",
        r"in one step each(?: \| [\d,.]+ ms){4} \| \*\*([\d,]+) ms",
        r"by a prefill worker(?: \| [\d,.]+ ms){4} \| \*\*([\d,]+) ms",
        "ms",
    ),
    Gain(
        "l20_agents",
        "prompts found cached,\nof 40 agents at once",
        r"\| 40 \| ([\d.]+) %",
        r"\| 40 \|[^|]+\|[^|]+\|[^|]+\| ([\d.]+) %",
        "%",
    ),
)


def in_words() -> str:
    """Describe the picture in words."""
    said = []
    for gain in GAINS:
        before, after = map(gain.said, gain.figures)
        said.append(f"{gain.number} {' '.join(gain.name.split())}: {before}, then {after}")
    return f"What lessons 10 to 20 bought. {'; '.join(said)}."


def draw(path: Path) -> None:
    """Draw a row for each lesson: its measure before, and below it after."""
    height = TOP + ROW * len(GAINS) + BOTTOM
    with canvas(path, WIDTH / 72, height / 72, in_words()) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, WIDTH)
        axes.set_ylim(height, 0)
        axes.set_axis_off()
        for line, gain in enumerate(GAINS):
            draw_row(axes, TOP + ROW * line, gain)
        note = "Grey: without the lesson. Blue: with it.\nA row's two bars have one scale; other rows have another."
        axes.text(12, height - 15, note, fontsize=8.5, color=MUTED, va="center", linespacing=1.3)


def draw_row(axes, y: float, gain: Gain) -> None:
    if y > TOP:
        axes.plot([12, WIDTH - 12], [y, y], color=LINE, linewidth=0.7)
    axes.text(12, y + ROW / 2, gain.number, fontsize=12, color=BAR_INK, va="center", fontweight="bold")
    axes.text(NAME, y + ROW / 2, gain.name, fontsize=9.5, color=INK, va="center", linespacing=1.15)
    figures = gain.figures
    most = max(map(number, figures))
    for at, figure, colour in zip((8, 22), figures, (MUTED, BAR), strict=True):
        length = max(1.5, ROOM * number(figure) / most)
        axes.barh(y + at, length, left=FIRST, height=10, align="edge", color=colour)
        axes.text(FIRST + length + 5, y + at + 5, gain.said(figure), fontsize=9.5, color=INK, va="center")


def files() -> dict[Path, str]:
    """Return the text that the picture should have."""
    return {PICTURE: drawn(draw)}
