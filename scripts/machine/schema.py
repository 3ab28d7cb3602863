"""Course machinery. A machine's report as dataclasses, the JSON Schema that follows from them, and a check against it.

    python -m scripts.machine.schema            write report.schema.json
    python -m scripts.machine.schema --check    exit 1 if it is out of date

The schema has only keywords that `mistakes` supports, so a report can be checked without another package. Text is
limited in length: reports come from strangers.
"""

import dataclasses
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from scripts.machine.mistakes import mistakes

VERSION = 1  # raise it whenever an old report would no longer be valid
FILE = Path(__file__).with_name("report.schema.json")
LONGEST = 400  # characters of a text
MOST = 400  # items of a list
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


# ---------------------------------------------------------------- dataclasses to JSON Schema, and back


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a report."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A machine's report, kv-course"}
    found = schema_of(Report)
    found["properties"]["version"] = {"const": VERSION}
    found["properties"]["when"] = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$", "maxLength": 20}
    return head | found


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the schema of a type that the dataclasses use."""
    simple = {str: {"type": "string", "maxLength": LONGEST}, bool: {"type": "boolean"}}
    numbers = {int: {"type": "integer", "minimum": 0}, float: {"type": "number", "minimum": 0}}
    if found := (simple | numbers).get(kind):
        return dict(found)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        properties = {name: schema_of(hint) for name, hint in hints.items()}
        return {
            "type": "object", "properties": properties, "required": list(hints), "additionalProperties": False,
        }  # fmt: skip
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return {"enum": list(inner)}
    if get_origin(kind) in (Union, types.UnionType):
        return {"anyOf": [schema_of(inner[0]), {"type": "null"}]}
    if get_origin(kind) is list:
        return {"type": "array", "items": schema_of(inner[0]), "maxItems": MOST}
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": schema_of(inner[1])}
    raise TypeError(f"no schema for {kind}")


def from_json(data: Any) -> Report:
    """Return the report that `data` describes.

    Raises:
        ValueError: it is not a report; the message names the first mistake and its place.
    """
    if found := mistakes(data, schema(), "the report"):
        raise ValueError(found[0])
    return built(Report, data)


def built(kind: Any, data: Any) -> Any:
    """Return data that fits a type's schema as an object of that type."""
    if data is None:
        return None
    if get_origin(kind) in (Union, types.UnionType):
        return built(get_args(kind)[0], data)
    if get_origin(kind) is list:
        return [built(get_args(kind)[0], item) for item in data]
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: built(hints[name], value) for name, value in data.items()})
    return data


def main(argv: list[str] | None = None) -> int:
    """Write report.schema.json, or say that it is out of date."""
    import json

    from scripts.pages.generated import asks_for_check, settle

    text = json.dumps(schema(), indent=1) + "\n"
    return settle({FILE: text}, asks_for_check(__doc__, argv), "python -m scripts.machine.schema")


if __name__ == "__main__":
    sys.exit(main())
