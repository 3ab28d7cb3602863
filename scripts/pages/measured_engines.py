"""Course machinery. The tables of pages 7 and 9 from kept runs: engines, servers and steps."""

import re
from itertools import groupby
from pathlib import Path

from scripts.pages.generated import markdown
from scripts.pages.measured_cells import Row, digits

ENGINES = {
    "ours": "ours",
    "ours without a compiler": "without a compiler",
    "transformers generate": "transformers `generate`",
    "vllm": "vLLM, CPU build",
    "llama.cpp": "llama.cpp",
    "openvino": "OpenVINO GenAI",
}
STEPS = ("one prompt, the others wait", "the other prompts' own tokens", "decode, {} steps")
SERVED = ("first token, p50 ms", "first token, p99 ms", "gap, p50 ms", "gap, p99 ms")


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


def shared_steps(report: Row) -> str:
    """Return where the time of the load with a shared beginning goes."""
    rows = []
    for row, title in zip(report["rows"], STEPS, strict=True):
        parts = [row["matrices"], row["attention"], row["waiting"]]
        times = [*parts, row["ms"] - sum(parts), row["ms"]]
        rows.append([title.format(row["count"]), str(row["prompt tokens"] or ""), *(f"{ms:,.0f}" for ms in times)])
    head = ["steps", "prompt tokens", "matrices", "attention", "waiting for other threads", "the rest", "all"]
    return markdown(head, rows)


def prefill_step(report: Row) -> str:
    """Return the parts of a step that computes prompts."""
    (row,) = report["rows"]
    last = row["norms"] + row["heads"], row["cache writes"], row["the rest"], row["ms"]
    times = row["matrices"], row["attention"], row["waiting"], *last
    head = ["matrices", "attention", "waiting for other threads", "norms and RoPE", "cache writes", "head, Python"]
    return markdown([*head, "whole step"], [[f"{ms:,.0f}" for ms in times]], texts=0)
