"""Course machinery. A pytest plugin for `.ci/run`: what each test costs, and what is said at the end of a run.

    python -m pytest -p tests.closing --closing build/ci/tests.txt

The end names each failed test with its message and the command that runs it alone, the dearest tests, and the sum. A
test that passes in a run of `--lf` had failed before: it is called flaky. `--keep-times` writes the costs to
tests/times.json, by which `make test-all SHARD=1/4` cuts the tests in four and tests/course/test_budget.py judges what
`.ci/run` may cost. A cost is processor time, also of the processes that a test waits for: what else the machine does is
not in it.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMES = ROOT / "tests/times.json"
DEAREST = 15
LEAST = 0.2  # seconds; a cheaper function is not kept
COST = "processor seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("closing")
    group.addoption("--closing", type=Path, metavar="FILE", help="also write what is said at the end to this file")
    group.addoption("--keep-times", action="store_true", help="write what each test costs to tests/times.json")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Closing(config), "closing-of-the-run")


def function_of(nodeid: str) -> str:
    """Return a test's file and function, without its parameters."""
    return nodeid.partition("[")[0]


def processor_seconds() -> float:
    """Return the processor time of this process and of the processes that have ended and that it waited for."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


class Closing:
    """Counts what each test costs, in the process that runs it, and sums up in the one that shows the results."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.began = 0.0
        self.costs: Counter[str] = Counter()
        self.failed: dict[str, str] = {}
        self.passed: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.began = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo):
        report = yield
        if call.when == "teardown":
            report.user_properties.append((COST, processor_seconds() - self.began))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.costs[report.nodeid] = dict(report.user_properties).get(COST, 0.0)
        if report.failed:
            self.failed.setdefault(report.nodeid, message_of(report))
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, message_of(report))

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if hasattr(self.config, "workerinput"):
            return
        if self.config.getoption("--keep-times"):
            keep(self.costs)
        text = self.text()
        terminalreporter.write(f"\n{text}")
        if path := self.config.getoption("--closing"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(text)

    def text(self) -> str:
        """Return the failures, the dearest tests and the sum."""
        lines = []
        for nodeid, message in self.failed.items():
            lines += [f"FAILED {nodeid}", *(f"    {line}" for line in message.splitlines()[:12])]
            lines += [f'  python -m pytest -m "" "{nodeid}"', ""]
        if self.config.getoption("lf", False):
            lines += [f"flaky: {nodeid} failed among the others and passes alone; mend it" for nodeid in self.passed]
        lines.append(f"The dearest of {len(self.costs)} tests, in processor seconds:")
        lines += [f"{cost:8.1f}  {nodeid}" for nodeid, cost in self.costs.most_common(DEAREST)]
        lines.append(f"{sum(self.costs.values()):8.1f}  in all")
        return "\n".join(lines) + "\n"


def message_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return what a failure says, without its traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr)[-2000:]


def keep(costs: Counter[str]) -> None:
    """Write what each function costs, beside those that did not run."""
    new: Counter[str] = Counter()
    for nodeid, cost in costs.items():
        new[function_of(nodeid)] += cost
    merged = times() | {name: round(cost, 1) for name, cost in new.items()}
    kept = {name: cost for name, cost in sorted(merged.items()) if cost >= LEAST and exists(name)}
    TIMES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8", newline="\n")


def exists(name: str) -> bool:
    """Whether a function is still in its file."""
    path, _, function = name.partition("::")
    file = ROOT / path
    return file.exists() and f"def {function.rpartition('::')[2]}(" in file.read_text(encoding="utf-8")


def times() -> dict[str, float]:
    """Return the processor seconds of each function that costs more than next to nothing."""
    return json.loads(TIMES.read_text(encoding="utf-8")) if TIMES.exists() else {}
