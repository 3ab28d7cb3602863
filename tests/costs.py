"""Course machinery. What tests cost: processor seconds by function and mark, kept in tests/times.json.

`make test-all SHARD=1/4` cuts the tests in four parts by them, and tests/course/test_budget.py judges what `.ci/run`
may cost. Only the run of a whole file tells what its functions cost.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMES = ROOT / "tests/times.json"
COST = "processor seconds"
LEAST = 0.2  # seconds; what costs less is not kept
MARKS = ("nightly", "ci")


class Key(NamedTuple):
    """A function with its file, and the mark of those of its tests that are meant: nightly, ci, or "" for none."""

    function: str
    mark: str


def key_of(item: pytest.Item) -> Key:
    """Return what a test's cost is added to."""
    mark = next((name for name in MARKS if item.get_closest_marker(name)), "")
    return Key(item.nodeid.partition("[")[0], mark)


def processor_seconds() -> float:
    """Return the processor time of this process, of those that it waited for, and on Linux of those that it runs."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system + of_living_children(os.getpid())


def of_living_children(pid: int) -> float:
    """Return the processor time of a process's children and theirs: servers, browsers, forked checks."""
    total = 0.0
    with suppress(OSError):  # it ended meanwhile
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, listed.read_text(encoding="ascii").split()):
                fields = Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + of_living_children(child)
    return total


def times() -> dict[Key, float]:
    """Return the processor seconds of what costs more than next to nothing."""
    kept = json.loads(TIMES.read_text(encoding="utf-8")) if TIMES.exists() else {}
    return {Key(function, mark): cost for function, costs in kept.items() for mark, cost in costs.items()}


def keep(costs: Iterable[tuple[Key, float]]) -> None:
    """Write what was measured, beside what did not run."""
    new: Counter[Key] = Counter()
    for key, cost in costs:
        new[key] += cost
    kept: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for key, cost in sorted((times() | new).items()):
        if cost >= LEAST and exists(key.function):
            kept[key.function][key.mark] = round(cost, 1)
    TIMES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8", newline="\n")


def exists(function: str) -> bool:
    """Whether a function is still in its file."""
    path, _, name = function.partition("::")
    file = ROOT / path
    return file.exists() and f"def {name.rpartition('::')[2]}(" in file.read_text(encoding="utf-8")
