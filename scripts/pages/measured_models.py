"""Course machinery. The tables of pages 15, 16 and 17 from kept runs, and of the families."""

from itertools import groupby

from scripts.pages.generated import markdown
from scripts.pages.measured_cells import Row, digits, of_part

BESIDE = "of Qwen3's"
# sequences, queries and tokens that page 16 shows of the reading of latents
READ = {(1, 1, 256), (1, 1, 4096), (8, 1, 4096), (1, 64, 1024), (1, 512, 1024), *((1, n, 4096) for n in (64, 256, 512))}
METHODS = {
    "plain": "plain: a step for each vector",
    "plain, groups of 32": "plain, groups of 32",
    "keys by channel": "keys by channel, 16 tokens each",
    "rotated": "rotated, a step for each vector",
    "rotated, groups of 32": "**rotated, groups of 32**",
}


def requests_with_windows(report: Row) -> str:
    """Return the requests that run at once, with and without windows."""
    keys = "Qwen3 most", "windows most", "Qwen3 mean", "windows mean"
    rows = [
        [f"{int(row['case'].split()[2]):,}", *(str(row[key]) if "most" in key else mean(row[key]) for key in keys)]
        for row in of_part(report, "requests")
    ]
    head = ["prompts of, tokens", "Qwen3, most", "windows, most", "Qwen3, mean", "windows, mean"]
    return markdown(head, rows, texts=0)


def mean(value: float) -> str:
    """Return a mean of counts with two digits, or whole."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


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
        if (row["sequences"], row["queries"], row["tokens"]) not in READ:
            continue
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


def families(report: Row) -> str:
    """Return each family's speed, over Qwen3's and transformers', and as a share of its limit, case by case."""
    cases = list(dict.fromkeys(row["case"] for row in report["rows"]))
    found = {(row["family"], row["case"]): row for row in report["rows"]}
    rows = []
    for family in dict.fromkeys(row["family"] for row in report["rows"]):
        cells = [family]
        for case in cases:
            row = found[family, case]
            cells += [digits(row["tokens/s"]), f"{row[BESIDE]:.2f}"]
            cells += [f"{row['times']:.1f}" if row["times"] else "", f"{row['% of limit']:.0f} %"]
        rows.append(cells)
    head = [name for case in cases for name in (f"{case}, tokens/s", "÷ Qwen3", "÷ transformers", "of the limit")]
    return markdown(["model", *head], rows)
