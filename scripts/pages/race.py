"""Course machinery. Records the front page's race: lessons 0, 1, 5, 8 and 9 answer the ladder's requests.

    python -m scripts.pages.race            # run the five engines, write lessons/ladder/race.js and the rows

One run of each gives the order of tokens and their relative times. The length of a run is the ladder's own median, from
ladder.json, so that page and race agree. All five must give the same tokens.
"""

import argparse
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from scripts import ROOT, first_line
from scripts.pages.generated import fill, settle
from scripts.pages.ladder import FOLDER, read_report

RECORD, HERO = FOLDER / "race.js", ROOT / "site" / "theme" / "partials" / "hero-race.html"
RUNNERS = (0, 1, 5, 8, 9)
START = "// Recorded by scripts/pages/race.py: do not edit, record again.\nwindow.KV_RACE = "
SHADES = {0: "f", 1: "b", 5: "c", 8: "d", 9: "a"}  # a colour for each lesson
REST = 1.1  # seconds into the race, when three lanes are done and lesson 0 is on its third square
Lane = dict[str, Any]


def lanes(new_tokens: int) -> list[Lane]:
    """Return each runner's lesson, name, speed and seconds, from the ladder's figures."""
    found = []
    for row in read_report().rows:
        number, _, name = row["lesson"].partition(" ")
        if int(number) in RUNNERS:
            speed = row["new tokens/s"]
            found.append({"lesson": int(number), "name": name, "speed": speed, "seconds": round(new_tokens / speed, 3)})
    return found


def record() -> dict[str, Any]:
    """Run the five engines once, each after a run that warms it up."""
    from scripts.bench import ladder
    from scripts.bench.options import model_of

    from mini_engine.checkpoint.config import DTYPES
    from mini_engine.families.qwen3 import load_model

    args = Namespace(model=None, requests=None, quick=False, lessons=None)

    def reload():
        return load_model(model_of(args), DTYPES["float32"], "cpu")

    model = reload()
    load = ladder.load_of(args, model.config.vocab_size)
    passes = {}
    for lesson in RUNNERS:
        run = ladder.build(lesson, model, reload, load)
        passes[lesson] = [run() for _ in range(2 if lesson else 1)]  # the slow lesson 0 needs no warm-up
    ladder.check_equal(passes)
    found = lanes(load.new_tokens)
    for lane in found:
        lane["came"] = shares(passes[lane["lesson"]][-1].came)
    return {"wanted": [wanted for _, wanted in load.jobs], "lanes": found}


def shares(came: list[tuple[float, int]]) -> list[list[int]]:
    """Return for each token the time since the previous one, in thousandths of the run, and its request."""
    end, before, found = came[-1][0], 0, []
    for seconds, request in came:
        at = round(1000 * seconds / end)
        found.append([at - before, request])
        before = at
    return found


def read() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8").removeprefix(START).rstrip(";\n"))


def text(race: dict[str, Any]) -> str:
    return START + json.dumps(race, separators=(",", ":")) + ";\n"


def full(lane: Lane, wanted: list[int], seconds: float) -> list[float]:
    """Return the share of each request's tokens that had arrived after `seconds`."""
    got, at = [0] * len(wanted), 0
    for wait, request in lane["came"]:
        at += wait
        if at <= 1000 * seconds / lane["seconds"]:
            got[request] += 1
    return [round(have / want, 2) for have, want in zip(got, wanted, strict=True)]


def rows(race: dict[str, Any]) -> str:
    """Return the race after REST seconds, as HTML, shown before it runs and where scripts do not run."""
    slowest = race["lanes"][0]["speed"]
    lines = []
    for lane in race["lanes"]:
        number, seconds = lane["lesson"], lane["seconds"]
        gain = f"{lane['speed'] / slowest:,.0f} ×" if lane["speed"] > slowest else ""
        parts = full(lane, race["wanted"], REST)
        squares = "".join("<i></i>" if part == 1 else f'<i style="--full:{part:g}"></i>' for part in parts)
        lines.append(
            f'<li class="kv-lane {SHADES[number]}" data-lesson="{number}"><span class="kv-lane__name"><b>{number}</b> '
            f'{lane["name"]}</span><span class="kv-lane__track">{squares}</span>'
            f'<span class="kv-lane__time"><output>{min(seconds, REST):.1f} s</output><small>{gain}</small></span>'
            f'<span class="kv-lane__speed">{lane["speed"]:,.0f}<small> tokens/s</small></span></li>'
        )
    return "\n".join(lines)


def files(race: dict[str, Any] | None = None) -> dict[Path, str]:
    """Return the texts that the record and the front page should have; without a race, those of the recorded one."""
    race = race or read()
    timed = {lane["lesson"]: lane for lane in lanes(sum(race["wanted"]))}
    for lane in race["lanes"]:
        lane |= timed[lane["lesson"]]
    return {RECORD: text(race), HERO: fill(HERO.read_text(encoding="utf-8"), "lanes", rows(race))}


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=first_line(__doc__).removeprefix("Course machinery. ")).parse_args(argv)
    return settle(files(record()), check=False)


if __name__ == "__main__":
    sys.exit(main())
