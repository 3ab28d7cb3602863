"""Course machinery. A pytest plugin for `.ci/run`: what each test costs, and what is said at the end of a run.

    python -m pytest -p tests.closing --closing build/ci/tests.txt

The end names each failed test with its message and the command that runs it alone, the dearest tests, and the sum. A
test that passes in a run of `--lf` had failed before: it is called flaky. A cost is processor time, that of processes
that a test waits for included, so it does not depend on what else the machine does. `--keep-times` writes the costs to
tests/times.json.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.costs import COST, Key, keep, key_of, processor_seconds

DEAREST = 15


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("closing")
    group.addoption("--closing", type=Path, metavar="FILE", help="also write what is said at the end to this file")
    group.addoption("--keep-times", action="store_true", help="write what each test costs to tests/times.json")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Closing(config), "closing-of-the-run")


class Closing:
    """Counts what each test costs, in the process that runs it, and sums up in the one that shows the results."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.began = 0.0
        self.costs: dict[str, tuple[Key, float]] = {}
        self.failed: dict[str, str] = {}
        self.passed: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.began = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        if call.when == "teardown":
            report.user_properties.append((COST, [*key_of(item), max(0.0, processor_seconds() - self.began)]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if found := dict(report.user_properties).get(COST):
            function, mark, cost = found
            self.costs[report.nodeid] = Key(function, mark), cost
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
            keep(self.costs.values())
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
        costs = Counter({nodeid: cost for nodeid, (_, cost) in self.costs.items()})
        lines.append(f"The dearest of {len(costs)} tests, in processor seconds:")
        lines += [f"{cost:8.1f}  {nodeid}" for nodeid, cost in costs.most_common(DEAREST)]
        lines.append(f"{costs.total():8.1f}  in all")
        return "\n".join(lines) + "\n"


def message_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return what a failure says, without its traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr)[-2000:]
