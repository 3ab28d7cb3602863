"""Course machinery. A pytest plugin: runs one part of several of the collected tests, `--shard 2/4`.

The parts follow the order of the files and cost about the same by tests/times.json, so that a nightly run on four
machines ends as early as it can.
"""

from collections import Counter

import pytest

from tests.costs import Key, key_of, times

NEXT_TO_NOTHING = 0.02  # seconds: a test without a record


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", type=part_of, default=(1, 1), metavar="K/N", help="run the K-th of N parts")


def part_of(text: str) -> tuple[int, int]:
    """Return K and N of "K/N".

    Raises:
        pytest.UsageError: it is no such text, or K is not between 1 and N.
    """
    part, _, parts = text.partition("/")
    if part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts):
        return int(part), int(parts)
    raise pytest.UsageError(f"--shard {text!r} is no part; give K/N with K from 1 to N, such as 1/4")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = config.getoption("--shard")
    where = parts_of([key_of(item) for item in items], parts, times())
    config.hook.pytest_deselected(items=[item for item, its in zip(items, where, strict=True) if its != part])
    items[:] = [item for item, its in zip(items, where, strict=True) if its == part]


def parts_of(tests: list[Key], parts: int, recorded: dict[Key, float]) -> list[int]:
    """Return the part, from 1 to `parts`, that each test belongs to."""
    counts = Counter(tests)
    costs = [recorded.get(key, 0.0) / counts[key] + NEXT_TO_NOTHING for key in tests]
    total, so_far, found = sum(costs), 0.0, []
    for cost in costs:
        found.append(int(parts * (so_far + cost / 2) / total) + 1)
        so_far += cost
    return found
