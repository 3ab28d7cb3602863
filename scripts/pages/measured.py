"""Course machinery. Writes the tables of pages 7, 9, 15, 16 and 17 from the runs that `bench.py scoreboard` keeps.

A run is a JSON file beside the page, and its table stands between two comments of the table's name. Without the file,
the table that stands there stays.
"""

import json
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from scripts import ROOT
from scripts.pages.generated import fill

LESSONS = ROOT / "lessons"
ENGINES = {
    "ours": "ours",
    "ours without a compiler": "without a compiler",
    "transformers generate": "transformers `generate`",
    "vllm": "vLLM, CPU build",
    "llama.cpp": "llama.cpp",
    "openvino": "OpenVINO GenAI",
}
METHODS = {
    "plain": "plain: a step for each vector",
    "plain, groups of 32": "plain, groups of 32",
    "keys by channel": "keys by channel, 16 tokens each",
    "rotated": "rotated, a step for each vector",
    "rotated, groups of 32": "**rotated, groups of 32**",
}
SERVED = ("first token, p50 ms", "first token, p99 ms", "gap, p50 ms", "gap, p99 ms")
Row = dict[str, Any]


class Table(NamedTuple):
    """A block of a page, written from a kept run."""

    file: str
    name: str
    write: Callable[[Row], str]


def markdown(head: list[str], rows: list[list[str]], texts: int = 1) -> str:
    """Return a table whose columns are numbers, except for the first `texts`."""
    lines = [head, *[["---"] * texts + ["---:"] * (len(head) - texts)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def digits(value: float) -> str:
    """Return a number with three digits or, above, whole."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def of_part(report: Row, part: str) -> list[Row]:
    """Return the rows of one part of a suite."""
    return [row for row in report["rows"] if row["part"] == part]


def where(report: Row) -> str:
    """Return the machine, torch's version and the day of a run, as far as the file has them."""
    machine = report["machine"]
    day = f", {machine['date']}" if "date" in machine else ""
    return f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch'].partition('+')[0]}{day}"


# ---------------------------------------------------------------- pages 7 and 9: engines and servers


def engines(report: Row) -> str:
    """Return the engines' tokens/s, a row for each load."""
    names = list(dict.fromkeys(row["engine"] for row in report["rows"]))
    speeds = {(row["load"], row["engine"]): row["tokens/s"] for row in report["rows"]}
    loads = list(dict.fromkeys(load for load, _ in speeds))
    rows = [
        [
            re.sub(r"(× .*)$", r"\1 tokens", load),
            *(digits(speeds[load, name]) if (load, name) in speeds else "" for name in names),
        ]
        for load in loads
    ]
    return markdown(["tokens/s", *map(ENGINES.__getitem__, names)], rows)


def versions(report: Row) -> str:
    """Describe the run of the engines: the machine, its rates, versions and peak memory."""
    rates = [float(rate) for rate in re.findall(r"memory read at ([\d.]+) GB/s", "\n".join(report["notes"]))]
    told = dict(re.findall(rf"^({'|'.join(map(re.escape, ENGINES))}): (.*)$", "\n".join(report["notes"]), re.MULTILINE))
    own = [f"{ENGINES[name]} {version}" for name, version in told.items() if not name.startswith("ours")]
    rounds = re.search(r"medians of \d+ rounds", report["notes"][0])
    peaks = [f"{ENGINES[row['engine']]} {row['× weights and pool']:.1f}" for row in report["more"]]
    begun = f"{rounds[0].capitalize()}; " if rounds else ""
    file = Path(report["file"]).name
    return (
        f"{begun}{where(report)} ([{file}]({file})); "
        f"{report['machine']['matrix_gflop_s']['bfloat16']} Gflop/s in large products of bfloat16; memory read at "
        f"{min(rates):.0f} to {max(rates):.0f} GB/s in the same rounds. Versions: {', '.join(own)}. "
        f"Peak memory relative to weights and pool: {', '.join(peaks)}."
    )


def servers(report: Row) -> str:
    """Return the servers' figures, a row for each load, ours first."""
    rows = []
    for load, found in groupby(report["rows"], key=lambda row: row["load"]):
        beside = list(found)
        cells = [" / ".join(digits(row["tokens/s"]) for row in beside)]
        cells += [" / ".join(f"{row[key]:,.0f}" for row in beside) for key in SERVED]
        rows.append([clients(load), *cells, " / ".join(f"{row['good a second']:.2f}" for row in beside)])
    names = " / ".join(dict.fromkeys(row["server"] for row in report["rows"]))
    return markdown([names, "tokens/s", "first token, p50 ms", "p99", "gap, p50 ms", "p99", "good a second"], rows)


def clients(load: str) -> str:
    """Return a load as readers say it: "closed, 8, prompts of 512" is "8 clients, prompts of 512 tokens"."""
    kind, _, rest = re.sub(r"(of \d+|shared)$", r"\1 tokens", load).partition(", ")
    if kind == "open":
        return f"arrivals, {rest}"
    return re.sub(r"^(\d+)", lambda count: f"{count[1]} client{'s' * (count[1] != '1')}", rest)


# ---------------------------------------------------------------- page 9: steps


def steps(report: Row) -> dict[tuple[str, str], Row]:
    """Return milliseconds by batch and variant: each part's, and the limit of the whole step."""
    found: dict[tuple[str, str], Row] = {}
    for row in report["rows"]:
        batch, variant = row["step"].split(" at once, ")
        parts = found.setdefault((batch, variant), {})
        parts[row["part"]] = row["ms"]
        if row["part"] == "whole step":
            parts["limit"] = row["limit, ms"]
    return found


def steps_before(report: Row) -> str:
    """Return the parts of the steps of lessons 0 to 8."""
    rows = []
    for (batch, variant), ms in steps(report).items():
        if variant == "lessons 0 to 8":
            between = ms["sampling"] + ms["schedule and plan"] + ms["rest of the engine"]
            parts = ms["linears"], ms["attention"], ms["rest of the model"], between, ms["whole step"], ms["limit"]
            rows.append([batch, *(f"{part:.0f}" for part in parts)])
    head = ["sequences", "linear layers", "attention", "rest of the model", "sampling, scheduling", "whole step"]
    return markdown([*head, "this machine's limit"], rows, texts=0)


def steps_after(report: Row) -> str:
    """Return the whole steps before and with lesson 9."""
    found = steps(report)
    rows = [
        [batch, *(f"{ms:.0f}" for ms in (parts["whole step"], found[batch, "lesson 9"]["whole step"], parts["limit"]))]
        for (batch, variant), parts in found.items()
        if variant == "lessons 0 to 8" and (batch, "lesson 9") in found
    ]
    return markdown(["sequences", "before", "this lesson", "this machine's limit"], rows, texts=0)


# ---------------------------------------------------------------- pages 15, 16 and 17


def requests_with_windows(report: Row) -> str:
    """Return the requests that run at once, with and without windows."""
    keys = "Qwen3 most", "windows most", "Qwen3 mean", "windows mean"
    rows = [
        [f"{int(row['case'].split()[2]):,}", *(str(row[key]) if "most" in key else f"{row[key]:.2g}" for key in keys)]
        for row in of_part(report, "requests")
    ]
    head = ["prompts of, tokens", "Qwen3, most", "windows, most", "Qwen3, mean", "windows, mean"]
    return markdown(head, rows, texts=0)


def decode_with_windows(report: Row) -> str:
    """Return decode after a long text, all layers full and with windows, beside transformers."""
    found = {(row["layers"], row["case"]): row for row in report["rows"]}
    rows = []
    for (kind, case), full in found.items():
        if kind == "full" and (windows := found.get(("windows", case))):
            ours = [full["tokens/s"], windows["tokens/s"], windows["tokens/s"] / full["tokens/s"]]
            rows.append([case.split()[0], *map(digits, [*ours, full["transformers"], windows["transformers"]])])
    head = ["sequences", "all layers full", "windows", "times", "transformers, full", "transformers, windows"]
    return markdown(head, rows, texts=0)


def latents_read(report: Row) -> str:
    """Return both ways to read latents."""
    rows, last = [], ""
    for row in of_part(report, "reading"):
        keys = "expanded ms", "absorbed ms", "expanded / absorbed", "counted"
        shape, last = "" if row["case"] == last else row["case"], row["case"]
        size = f"{row['sequences']} × {row['queries']}", f"{row['tokens']:,}"
        rows.append([shape, *size, *(f"{row[key]:,.0f}" if row[key] >= 10 else f"{row[key]:.2g}" for key in keys)])
    head = ["shape", "sequences × queries", "tokens", "expanded, ms", "absorbed, ms", "expanded / absorbed", "counted"]
    return markdown(head, rows)


def latents_steps(report: Row) -> str:
    """Return decode with all latents expanded and with none."""
    rows = [
        [
            row["case"],
            f"{row['history']:,}",
            *map(digits, (row["expanded tokens/s"], row["absorbed tokens/s"], row["times"])),
        ]
        for row in of_part(report, "step")
    ]
    head = ["model of random weights", "history", "expanded, tokens/s", "absorbed, tokens/s", "times"]
    return markdown(head, rows)


def bits_read(report: Row) -> str:
    """Return the times of attention and of steps by kind of row: milliseconds, and how many times as fast."""
    rows = []
    named = [(row["what"].rsplit(": ", 1), row) for row in report["rows"] if row["part"] in ("attention", "decode")]
    for title, found in groupby(named, key=lambda one: one[0][0]):
        case, tokens = (
            ("attention of one layer", title.split()[2]) if "×" in title else ("a whole step", title.split()[-1])
        )
        cells = [f"{case}, {int(tokens):,} tokens"]
        for (_, kind), row in found:
            cells += [f"{row['ms']:.3g} ms"] + ([] if kind == "bfloat16" else [f"{row['×']:.2f} ×"])
        rows.append(cells)
    return markdown(["", "bfloat16", "int8", "", "int4", ""], rows)


def methods(report: Row) -> str:
    """Return KL by method, with 4 bits."""
    rows = [
        [METHODS[row["what"]], f"{row['bits stored']:g}", *(f"{row[f'KL, seed {seed}']:.3f}" for seed in range(3))]
        for row in report["more"]
        if row["bits"] == 4
    ]
    return markdown(["", "bits stored", "KL, seed 0", "seed 1", "seed 2"], rows)


TABLES = (
    Table("l7_server/serving.json", "servers", servers),
    Table("l7_server/serving-limits.json", "server limits", servers),
    Table("l9_speed/peers.json", "engines", engines),
    Table("l9_speed/peers.json", "versions", versions),
    Table("l9_speed/step.json", "steps before", steps_before),
    Table("l9_speed/step.json", "steps after", steps_after),
    Table("l15_windows/windows.json", "requests", requests_with_windows),
    Table("l15_windows/histories.json", "histories", decode_with_windows),
    Table("l16_latents/latents.json", "reading", latents_read),
    Table("l16_latents/latents.json", "steps", latents_steps),
    Table("l17_bits/kv_dtype.json", "attention", bits_read),
    Table("l17_bits/methods.json", "methods", methods),
)


def files() -> dict[Path, str]:
    """Return the text that each page should have."""
    pages: dict[Path, str] = {}
    for table in TABLES:
        kept = LESSONS / table.file
        if kept.is_file():
            page = kept.with_name("README.md")
            report = json.loads(kept.read_text(encoding="utf-8")) | {"file": table.file}
            pages[page] = fill(pages.get(page) or page.read_text(encoding="utf-8"), table.name, table.write(report))
    return pages
