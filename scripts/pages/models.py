"""Course machinery. Writes the tables and the picture of lessons/what-models-keep.md from lessons/models.toml.

The figures come from `mini-engine pool`'s own code, which asks the layout of an engine's pools.
"""

import functools
import json
import tempfile
import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.bench.plot import BAR, INK, LINE, MUTED, SERIES, canvas, drawn
from scripts.pages.generated import fill

PAGE = ROOT / "lessons" / "what-models-keep.md"
DATA = ROOT / "lessons" / "models.toml"
PICTURE = ROOT / "lessons" / "what-models-keep.svg"
SHORT, LONG, ASKED = 4096, 131_072, 32_768  # tokens
MEMORY = 24 * 2**30
PUBLISHED = {"l11_hybrid": "Qwen3.5-0.8B", "l15_windows": "Gemma 3 270M", "l16_latents": "Youtu-LLM-2B"}
RUNS = {True: "*tiny model run*", False: "*by config*"}
COLOURS = {"full": BAR, "window": SERIES[1], "state": SERIES[2], "latent": SERIES[3]}
KINDS = {"full": "all layers keep all tokens", "window": "windows in some layers", "state": "states in some layers"}
KINDS |= {"latent": "latents"}
WIDTH, ROW, TOP, BOTTOM = 330, 17, 6, 66  # in points; a phone shows all of it
FIRST, ROOM = 104, 170  # where bars begin, and the longest


@dataclass(frozen=True)
class Model:
    """A published model, as lessons/models.toml has it.

    config: settings by their names in config.json; "null" for null.
    """

    name: str
    id: str
    source: str
    read: date
    config: dict[str, Any]

    @functools.cached_property
    def known(self) -> tuple[Any, Any]:
        """What `mini-engine pool` reads from the config: a shape, and the function that builds the model, or None."""
        from mini_engine.cli.pool import shape_of

        settings = json.dumps(self.config).replace('"null"', "null")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(settings, encoding="utf-8")
            return shape_of(Path(folder))[:2]

    @property
    def runs(self) -> bool:
        """True if the engine runs its family, as tiny models have."""
        return self.known[1] is not None

    @functools.cached_property
    def costs(self) -> Any:
        """What its requests cost in bfloat16, in blocks of 16 tokens."""
        import torch

        from mini_engine.assembly.costs import Costs
        from mini_engine.assembly.engine_config import EngineConfig

        return Costs(self.known[0], torch.bfloat16, EngineConfig())

    @property
    def mean(self) -> float:
        """The bytes of a request of ASKED tokens, for each of its tokens."""
        return self.costs.request_bytes(ASKED) / ASKED

    @property
    def kind(self) -> str:
        """The kind of layer that sets the model apart."""
        kinds = [cost.kind for cost in self.costs.by_kind()]
        return next(kind for kind in ("latent", "state", "window", "full") if kind in kinds)

    @property
    def num_parameters(self) -> int:
        """The number of its parameters, without a vision tower; of a model that the engine runs."""
        from mini_engine.assembly.costs import count_parameters

        shape, build = self.known
        return count_parameters(build, shape)


def models() -> list[Model]:
    """Return the models of lessons/models.toml, in its order."""
    return [Model(**each) for each in tomllib.loads(DATA.read_text(encoding="utf-8"))["model"]]


def costs_table(found: list[Model]) -> str:
    """Return the table of what each model keeps."""
    lines = [
        f"| model | layers | a token | fixed | {SHORT:,} tokens | {LONG:,} | at once | seen |",
        "| --- | --- | --: | --: | --: | --: | --: | --- |",
    ]
    for model in found:
        costs = model.costs
        fixed = whole(costs.fixed_bytes) if costs.fixed_bytes else "–"
        sizes = [whole(costs.request_bytes(length)) for length in (SHORT, LONG)]
        cells = [model.name, layers_of(model), f"{costs.bytes_per_token:,}", fixed, *sizes]
        lines.append("| " + " | ".join([*cells, f"{costs.at_once(ASKED, MEMORY):,}", RUNS[model.runs]]) + " |")
    return "\n".join(lines)


def whole(num_bytes: int) -> str:
    """Return an amount that no line break divides."""
    from mini_engine.cli.pool import amount

    return amount(num_bytes).replace(" ", "\N{NO-BREAK SPACE}")


def layers_of(model: Model) -> str:
    """Return how many layers of each kind a model has."""
    return ", ".join(
        f"{cost.layers} {cost.kind}{f' of {cost.window:,}' if cost.window else ''}" for cost in model.costs.by_kind()
    )


def sources_table(found: list[Model]) -> str:
    """Return the table of where each model's settings were read."""
    lines = ["| model | on huggingface.co | settings read in | on |", "| --- | --- | --- | --- |"]
    for model in found:
        link = f"[{model.source.rpartition('/')[2]}]({model.source})"
        lines.append(f"| {model.name} | `{model.id}` | {link} | {model.read} |")
    return "\n".join(lines)


def in_words(found: list[Model]) -> str:
    """Describe the picture in words."""
    ends = (found[0], found[-1])
    said = [f"{model.name} {model.mean / 1024:.1f}" for model in ends]
    return f"Bars for {len(found)} models, KiB a token in a request of {ASKED:,} tokens, from {said[0]} to {said[1]}"


def draw(path: Path, found: list[Model]) -> None:
    """Draw a bar for each model, the most expensive first."""
    height = TOP + ROW * len(found) + BOTTOM
    with canvas(path, WIDTH / 72, height / 72, in_words(found)) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, WIDTH)
        axes.set_ylim(height, 0)
        axes.set_axis_off()
        for line, model in enumerate(found):
            y, length = TOP + ROW * (line + 0.5), max(1.5, ROOM * model.mean / found[0].mean)
            axes.text(FIRST - 6, y, model.name, fontsize=9, color=INK, va="center", ha="right")
            axes.barh(y, length, left=FIRST, height=11, color=COLOURS[model.kind])
            axes.text(FIRST + length + 5, y, f"{model.mean / 1024:.1f}", fontsize=9, color=INK, va="center")
        top = height - BOTTOM + 8
        axes.plot([12, WIDTH - 12], [top, top], color=LINE, linewidth=0.7)
        for index, (kind, says) in enumerate(KINDS.items()):
            x, y = 12 + index % 2 * 165, top + 13 + index // 2 * 16
            axes.barh(y, 9, left=x, height=9, color=COLOURS[kind])
            axes.text(x + 14, y, says, fontsize=8.5, color=INK, va="center")
        note = f"KiB a token in bfloat16: the mean of a request of {ASKED:,} tokens"
        axes.text(12, top + 48, note, fontsize=8.5, color=MUTED, va="center")


def lesson_pages(found: list[Model]) -> dict[Path, str]:
    """Return the pages that name a published checkpoint to run: how large it is, and what is known of it here."""
    pages = {}
    for folder, name in PUBLISHED.items():
        model = next(model for model in found if model.name == name)
        count, path = model.num_parameters, ROOT / "lessons" / folder / "README.md"
        size = f"{count / 1e9:.2f} billion parameters, {2 * count / 2**30:.2f} GiB in bfloat16"
        text = f"A published one: `{model.id}`, {size}, [{RUNS[model.runs]}](../{PAGE.name})."
        pages[path] = fill(path.read_text(encoding="utf-8"), "published", text)
    return pages


def files() -> dict[Path, str]:
    """Return the text that the page and the picture should have."""
    found = models()
    ranked = sorted(found, key=lambda model: -model.mean)
    page = fill(PAGE.read_text(encoding="utf-8"), "costs", costs_table(ranked))
    page = fill(page, "bars", f"[![{in_words(ranked)}]({PICTURE.name})]({PICTURE.name})")
    page = fill(page, "sources", sources_table(found))
    return {PAGE: page, PICTURE: drawn(lambda path: draw(path, ranked)), **lesson_pages(found)}
