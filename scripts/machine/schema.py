"""Course machinery. A machine's report as dataclasses, and reading one from JSON.

Reports come from strangers: whatever does not fit a field's type is refused, and text is limited in length.
"""

import dataclasses
import re
import types
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

VERSION = 1  # raise it whenever an old report would no longer be valid
LONGEST = 400  # characters of a text, items of a list
Status = Literal["ok", "failed", "left out", "missing"]
"""ok: it ran and is right. failed: it ran and is wrong, or it ended with an error. left out: it cannot run on this
machine. missing: there was no time for it, or the report was stopped. `why` is a sentence for all but ok."""


@dataclass
class Gpu:
    """The first GPU that torch sees. capability: its compute capability, such as "9.0"."""

    name: str
    capability: str
    memory_gb: float
    driver: str
    cuda: str


@dataclass
class Machine:
    """The machine and the checkout. load: runnable processes at the start, if the system reports it."""

    cpu: str
    architecture: str
    cores: int
    threads: int
    memory_gb: float | None
    load: float | None
    gpu: Gpu | None
    system: str
    python: str
    torch: str
    triton: str | None
    transformers: str
    commit: str
    dirty: bool


@dataclass
class Lesson:
    """A lesson's smoke script: its tokens against Hugging Face's, in float32. device: "" if it did not get that far."""

    number: int
    title: str
    status: Status
    device: str = ""
    tokens: int = 0
    equal_tokens: int = 0
    seconds: float | None = None
    why: str = ""


@dataclass
class KernelCheck:
    """A kernel's largest difference from the reference in float64, as a part of the largest number there."""

    name: str
    dtype: str
    device: str
    status: Status
    error: float | None = None
    limit: float | None = None
    why: str = ""


@dataclass
class Rates:
    """The machine's memory and arithmetic rates in this run, without an engine."""

    device: str
    read_gb_s: float
    matrix_gflop_s: dict[str, float]


@dataclass
class Model:
    """The model used for the speeds: random weights of a shape."""

    shape: str
    dtype: str
    device: str
    weight_gb: float


@dataclass
class Speed:
    """One load. Prompt tokens a second for prefill, new tokens a second of decode alone, and of whole answers.

    memory_share: bytes that a decode step has to read over its time, as a part of the memory rate.
    times: a shared beginning against as many prompts that share nothing; above 1, sharing is faster.
    """

    load: Literal["decode", "prefill", "shared beginning"]
    at_once: int
    status: Status
    tokens_per_second: float | None = None
    step_ms: float | None = None
    memory_share: float | None = None
    times: float | None = None
    runs: int = 0
    why: str = ""


@dataclass
class Comparison:
    """Decode steps in two ways on a GPU. times: how many times as fast the first is. equal: answers with its tokens."""

    first: str
    second: str
    at_once: int
    status: Status
    first_ms: float | None = None
    second_ms: float | None = None
    times: float | None = None
    equal: int | None = None
    why: str = ""


@dataclass
class Report:
    """The whole report. finished: it was not stopped; parts may still be missing if the time was up."""

    when: str
    quick: bool
    machine: Machine
    version: int = VERSION
    finished: bool = False
    seconds: float = 0.0
    lessons: list[Lesson] = field(default_factory=list)
    kernels: list[KernelCheck] = field(default_factory=list)
    model: Model | None = None
    rates: Rates | None = None
    speeds: list[Speed] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def parts(self) -> list[Any]:
        """Everything that has a status."""
        return [*self.lessons, *self.kernels, *self.speeds, *self.comparisons]

    def with_status(self, status: str) -> list[Any]:
        """The parts with this status."""
        return [part for part in self.parts if part.status == status]


# ---------------------------------------------------------------- from JSON


def from_json(data: Any) -> Report:
    """Return the report that `data` describes.

    Raises:
        ValueError: it is not a report; the message names the first mistake and its place.
    """
    report = built(Report, data, "the report")
    if report.version != VERSION:
        raise ValueError(f"the report.version is {report.version}; allowed: {VERSION}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", report.when):
        raise ValueError(f"the report.when is {shown(report.when)}, which is no time such as 2026-11-27T12:00:00Z")
    return report


def built(kind: Any, data: Any, place: str) -> Any:
    """Return data as an object of a type that the dataclasses use. Raises ValueError if it does not fit the type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if data is None else built(inner[0], data, place)
    if origin is Literal:
        if data not in [one for one in inner if type(one) is type(data)]:
            raise ValueError(f"{place} is {shown(data)}; allowed: {', '.join(map(str, inner))}")
        return data
    if not fits(kind, data):
        raise ValueError(f"{place} is {shown(data)}, which is no {getattr(kind, '__name__', kind)}")
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        if wrong := sorted(hints.keys() ^ data.keys()):
            raise ValueError(f"{place} {'lacks' if wrong[0] in hints else 'has, unlike any report,'} {shown(wrong[0])}")
        return kind(**{name: built(hints[name], value, f"{place}.{name}") for name, value in data.items()})
    if isinstance(data, list | str) and len(data) > LONGEST:
        raise ValueError(f"{place} has {len(data)} items or characters; at most {LONGEST} are allowed")
    if isinstance(data, int | float) and not 0 <= data < float("inf"):
        raise ValueError(f"{place} is {data}; it must be 0 or more, and finite")
    if isinstance(data, list):
        return [built(inner[0], item, f"{place}[{i}]") for i, item in enumerate(data)]
    if isinstance(data, dict):
        return {name: built(inner[1], value, f"{place}.{shown(name)}") for name, value in data.items()}
    return data


def fits(kind: Any, data: Any) -> bool:
    """Return True if JSON's type of `data` is the one that a type is written as. True and False are no numbers."""
    json_type = dict if dataclasses.is_dataclass(kind) else (int, float) if kind is float else get_origin(kind) or kind
    return isinstance(data, json_type) and (kind is bool or not isinstance(data, bool))


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
