"""Course machinery. A smoke script's report: the object for `--json`, and the lines for people."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any


@dataclass
class Divergence:
    """The first position at which two answers differ. gap: between the two highest reference logits there."""

    position: int
    expected: int | None
    got: int | None
    gap: float
    near_tie: bool
    where: str


@dataclass
class RequestReport:
    prompt_ids: list[int]
    ours: list[int]
    hf: list[int]
    match: bool
    first_divergence: Divergence | None = None


@dataclass
class Report:
    """The object that `--json` prints. not_exercised: features that the run was meant to show; not a failure."""

    lesson: int
    model: str
    dtype: str
    device: str
    match: bool
    requests: list[RequestReport]
    kv: dict[str, Any]
    seconds: dict[str, float]
    faults: list[str] = field(default_factory=list)
    not_exercised: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the object that --json prints: `more` are further keys of it, and `lines` are for people only."""
        data = asdict(self)
        more, _ = data.pop("more"), data.pop("lines")
        return data | more


def equal_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the number of tokens before the first difference."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def print_json(data: dict) -> None:
    print(json.dumps(data))


def show(report: Report, tokenizer) -> None:
    """Print the report for people."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    out = partial(console.print, markup=False)
    out(f"Lesson {report.lesson} · {report.model} · {report.dtype} on {report.device}", style="bold")
    for index, request in enumerate(report.requests):
        for line in request_lines(index, request, report.dtype, tokenizer):
            out(line)
    count, seconds = sum(len(request.ours) for request in report.requests), report.seconds
    paths = report.kv.get("speculation", {})  # lesson 14's figures, a line for each path
    out("KV: " + ", ".join(f"{key} {value}" for key, value in report.kv.items() if value is not paths))
    for name, figures in paths.items():
        out(f"    {name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
    out(
        f"{count} tokens in {seconds['ours']:.2f} s ({count / seconds['ours']:.0f} tokens/s); "
        f"Hugging Face {seconds['hf']:.2f} s"
    )
    for fault in report.faults:
        out(fault, style="bold red")
    for path in report.not_exercised:
        out(f"NOT EXERCISED  {path}", style="bold yellow")
    equal = sum(request.match for request in report.requests)
    verdict, style = ("PASS", "bold green") if report.match else ("FAIL", "bold red")
    out(f"{verdict}: {equal} of {len(report.requests)} answers equal Hugging Face's", style=style)
    for line in report.lines:
        out(line)


def request_lines(index: int, request: RequestReport, dtype: str, tokenizer) -> list[str]:
    """Return the lines of one request: prompt, answer, and the first difference from Hugging Face's, if any."""

    def text(ids: list[int]) -> str:
        return repr(tokenizer.decode(ids)) if tokenizer else str(ids)

    tail = request.prompt_ids[-32:]
    dots = "… " if len(tail) < len(request.prompt_ids) else ""
    lines = [f"[{index}] {len(request.prompt_ids)} prompt tokens {dots}{text(tail)}", f"    ours {text(request.ours)}"]
    if request.match:
        return lines
    lines.append(f"    HF   {text(request.hf)}")
    d = request.first_divergence
    if d is None:
        return lines
    near = f", a near-tie in {dtype}, which rounding may decide" if d.near_tie else ""
    return [
        *lines,
        f"    first difference at new token {d.position}: Hugging Face chose {d.expected}, ours {d.got}; "
        f"the two highest logits there are {d.gap:.4f} apart{near}",
        f"    {d.where}",
    ]
