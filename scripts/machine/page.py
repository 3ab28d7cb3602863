"""Course machinery. A report as Markdown that also reads well as plain text in a terminal of 80 columns."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.machine.schema import KernelCheck, Machine, Report

from rich.cells import cell_len, chop_cells

from mini_engine.base.errors import UserError

WIDTH = 80
SAYS = {
    "decode": "new tokens a second once all requests have their first, and the time of a step",
    "prefill": "prompt tokens a second, 128 of each request",
    "shared beginning": "new tokens a second of whole answers: 256 tokens in common, 16 own, 16 new; "
    "*times* is against prompts of the same length that share nothing",
}


def save(report: Report, folder: Path) -> None:
    """Write report.json and report.md, each atomically: neither a reader nor a crash leaves half a file.

    Raises:
        UserError: a file cannot be written.
    """
    texts = {"report.json": json.dumps(asdict(report), indent=1, ensure_ascii=False) + "\n"}
    texts["report.md"] = page_of(report)
    for name, text in texts.items():
        draft = folder / f"{name}.new"
        try:
            draft.write_text(text, encoding="utf-8", newline="\n")
            os.replace(draft, folder / name)  # noqa: PTH105 (what Path.replace calls)
        except OSError as error:
            raise UserError(f"{folder / name} cannot be written: {error.strerror}") from error


def page_of(report: Report) -> str:
    """Return the whole page."""
    parts = [
        "# A machine's report",
        wrapped(verdict(report)),
        about(report.machine, report),
        *(["## Tokens", lessons(report)] if report.lessons else []),
        *(["## Kernels", kernels(report)] if report.kernels else []),
        *(["## Speed", speeds(report)] if report.speeds else []),
        *(["## On the GPU", comparisons(report)] if report.machine.gpu else []),
    ]
    if lines := reasons(report):
        parts += ["## What failed, was left out, or is missing", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def verdict(report: Report) -> str:
    """Return the sentence that matters most."""
    failed, missing = report.with_status("failed"), report.with_status("missing")
    ran = [lesson for lesson in report.lessons if lesson.status != "missing"]
    equal, tokens = sum(lesson.equal_tokens for lesson in ran), sum(lesson.tokens for lesson in ran)
    words = [f"{equal} of {tokens} tokens of {len(ran)} lessons equal Hugging Face's." if ran else "No lesson ran."]
    if failed:
        words.append(f"{len(failed)} of {len(report.parts)} parts failed; the end of this page says how.")
    if missing:
        words.append(f"{len(missing)} of {len(report.parts)} parts are missing; the end of this page says why.")
    if not (failed or missing):
        words.append("Every part that can run here is right.")
    if not report.finished:
        words.insert(0, "Not finished.")
    return " ".join(words)


def about(machine: Machine, report: Report) -> str:
    """Return the table of the machine and of the run."""
    gpu, changes = machine.gpu, ", with changes" if machine.dirty else ""
    threads = f"{machine.cores} cores, {machine.threads} threads"
    busy = "" if machine.load is None else f", load {machine.load:g} at its beginning"
    memory = "" if machine.memory_gb is None else f", {machine.memory_gb:g} GiB"
    rows = [
        ("processor", f"{machine.cpu} ({machine.architecture}), {threads}{memory}"),
        ("GPU", f"{gpu.name}, {gpu.memory_gb:g} GiB, compute capability {gpu.capability}" if gpu else "none"),
        ("system", f"{machine.system}, Python {machine.python}"),
        ("torch", machine.torch + (f", driver {gpu.driver}, CUDA {gpu.cuda}" if gpu else "")),
        ("others", f"Triton {machine.triton or 'missing'}, transformers {machine.transformers}"),
        ("commit", machine.commit + changes),
        ("run", f"{report.when}, {report.seconds:.0f} s{busy}{', --quick' if report.quick else ''}"),
    ]
    if report.model and report.rates:
        model, rates = report.model, report.rates
        products = ", ".join(f"{rate:,.0f} Gflop/s in {dtype}" for dtype, rate in rates.matrix_gflop_s.items())
        rows += [("memory read", f"{rates.read_gb_s:g} GB/s on {rates.device}"), ("products", products)]
        rows += [("model", f"{model.shape}, random weights, {model.dtype} on {model.device}, {model.weight_gb:g} GB")]
    return table(["what", "this machine"], rows, "<<")


def lessons(report: Report) -> str:
    """Return the table of the lessons' tokens."""
    rows = []
    for one in report.lessons:
        equal = f"{one.equal_tokens}/{one.tokens}" if one.status in ("ok", "failed") else one.status
        seconds = "" if one.seconds is None else f"{one.seconds:.0f}"
        rows.append((f"{one.number} {one.title}", one.device, equal, one.status, seconds))
    return table(["lesson, float32", "on", "tokens equal", "so", "s"], rows, "<<><>")


def kernels(report: Report) -> str:
    """Return the table of the kernels' errors, a dtype in each column."""
    dtypes = list(dict.fromkeys(one.dtype for one in report.kernels))
    found = {(one.name, one.device, one.dtype): one for one in report.kernels}
    rows = []
    for name, device in dict.fromkeys((one.name, one.device) for one in report.kernels):
        checks = [found.get((name, device, dtype)) for dtype in dtypes]
        rows.append((name, device, *("" if one is None else shown_error(one) for one in checks)))
    note = wrapped("The largest error beside the reference in float64, as a part of its largest number.")
    return note + "\n\n" + table(["kernel", "on", *dtypes], rows, "<<" + ">" * len(dtypes))


def shown_error(check: KernelCheck) -> str:
    """Return a kernel's error, or its status if it has none."""
    return f"{check.error:.0e}" if check.status == "ok" and check.error is not None else check.status


def speeds(report: Report) -> str:
    """Return the table of the speeds."""
    rows = []
    for one in report.speeds:
        if one.status != "ok":
            rows.append((one.load, str(one.at_once), one.status, "", "", ""))
            continue
        share = "" if one.memory_share is None else f"{100 * one.memory_share:.0f} %"
        rows.append(
            (one.load, str(one.at_once), figure(one.tokens_per_second), figure(one.step_ms), share, figure(one.times))
        )
    notes = "\n".join(wrapped(f"- {load}: {says}.", "  ") for load, says in SAYS.items())
    return table(["load", "at once", "tokens/s", "ms a step", "of memory", "times"], rows, "<>>>>>") + "\n\n" + notes


def comparisons(report: Report) -> str:
    """Return the table of comparisons on a GPU."""
    rows = []
    for one in report.comparisons:
        cells = (figure(one.first_ms), figure(one.second_ms), figure(one.times), str(one.equal))
        rows.append(
            (
                f"{one.first} / {one.second}",
                str(one.at_once),
                *(cells if one.status == "ok" else (one.status, "", "", "")),
            )
        )
    note = wrapped(
        "Milliseconds of a decode step; *times* says how many times as fast the first is, and *same* how many answers "
        "have the same tokens (in half precision rounding may decide a near-tie)."
    )
    return note + "\n\n" + table(["two ways", "at once", "first", "second", "times", "same"], rows, "<>>>>>")


def reasons(report: Report) -> list[str]:
    """Return a line for each part that is not right, with the reason; parts with the same reason share a line."""
    found: dict[tuple[str, str], list[str]] = {}
    for part in report.parts:
        if part.status != "ok":
            found.setdefault((part.status, part.why), []).append(name_of(part))
    return [wrapped(f"- {status}: {'; '.join(names)}: {why}", "  ") for (status, why), names in found.items()]


def name_of(part: object) -> str:
    """Return a part's name for a sentence."""
    known = vars(part)
    if "title" in known:
        return f"lesson {known['number']}"
    if "dtype" in known:
        return f"{known['name']}, {known['dtype']} on {known['device']}"
    what = known.get("load") or f"{known['first']} / {known['second']}"
    return f"{what} at {known['at_once']}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> str:
    """Return a Markdown table with aligned columns, at most WIDTH wide. Its widest column is cut if necessary."""
    rows = [[cell.replace("|", "/") for cell in row] for row in rows]
    sizes = [max(3, *(cell_len(row[i]) for row in [list(titles), *rows])) for i in range(len(titles))]
    if (over := sum(sizes) + 3 * len(sizes) + 1 - WIDTH) > 0 and rows != (narrow := folded(titles, rows, sizes, over)):
        return table(titles, narrow, sides)
    lines = [
        "| " + " | ".join(padded(*each) for each in zip(row, sizes, sides, strict=True)) + " |"
        for row in [titles, *rows]
    ]
    rule = (
        "| "
        + " | ".join(("-" * (n - 1) + ":") if side == ">" else "-" * n for n, side in zip(sizes, sides, strict=True))
        + " |"
    )
    return "\n".join([lines[0], rule, *lines[1:]])


def folded(titles: Sequence[str], rows: Sequence[Sequence[str]], sizes: list[int], over: int) -> list[list[str]]:
    """Return rows whose widest column continues in the row below, so that the table is `over` narrower."""
    widest = sizes.index(max(sizes))
    room = max(8, cell_len(titles[widest]), sizes[widest] - over)
    found = []
    for row in rows:
        for i, piece in enumerate(lines_of(row[widest], room) or [""]):
            found.append([piece if k == widest else cell if i == 0 else "" for k, cell in enumerate(row)])
    return found


def lines_of(text: str, width: int) -> list[str]:
    """Return a text in lines of at most `width` columns of a terminal, where some characters take two."""
    lines = [""]
    for word in (piece for whole in text.split() for piece in chop_cells(whole, width)):
        longer = f"{lines[-1]} {word}".strip()
        if cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return [line for line in lines if line]


def padded(text: str, size: int, side: str) -> str:
    space = " " * (size - cell_len(text))
    return space + text if side == ">" else text + space


def wrapped(text: str, indent: str = "") -> str:
    """Return a text in lines of at most WIDTH columns, all but the first after an indent."""
    return f"\n{indent}".join(lines_of(text, WIDTH - len(indent)))


def figure(value: float | None) -> str:
    """Return a figure with three digits; "" for none."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
