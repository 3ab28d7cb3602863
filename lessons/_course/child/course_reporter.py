"""Course machinery. A pytest plugin: logs events as JSON lines, orders the tests, and stops those that do not finish.

KV_COURSE_ORDER is a JSON list of tasks, whose tests run in this order, and no others; null stands for the tests of no
task. Without it, all tests run, as they are collected.
"""

import faulthandler
import json
import os
from pathlib import Path

import course_overlay
import pytest
from _pytest.runner import runtestprotocol
from course_deadline import HUNG, Deadline, TookTooLong
from course_failure import describe, where
from course_sides import LastSides, of_comparison, value
from course_swaps import Experiments, as_found

REPORT = "KV_COURSE_REPORT"
ORDER = "KV_COURSE_ORDER"
TEST_SECONDS = "KV_COURSE_TEST_SECONDS"
LAST_SECONDS = "KV_COURSE_LAST_SECONDS"
MOST_HANGS = 3
AFTER_A_HANG = 0.4  # of the seconds for a test
MOST_OUTPUT = 2000


class Reporter:
    """The plugin: writes one line per event, flushed, so that `check` can follow along."""

    def __init__(self, path: str, seconds: float, order: list[int | None]) -> None:
        self.path = path
        self.seconds = seconds
        self.shorter = seconds * AFTER_A_HANG
        self.order = order
        self.hangs = 0
        self.seen: LastSides | None = None
        self.experiments = Experiments(self.shorter)
        self.doubtful: set[str] = set()  # failed tests of which the cause may be found by experiment
        self.is_experiment = False
        self.dumps, self.open, self.exit = json.dumps, open, os._exit  # whatever the student's code replaces

    def write(self, event: str, **fields) -> None:
        if self.is_experiment:
            return
        with self.open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(self.dumps({"event": event, **fields}) + "\n")

    def deadline(self, node) -> Deadline:
        def give_up(stack) -> None:
            """Report the test that cannot be stopped, and end the process."""
            error = TookTooLong()
            found = {"type": type(error).__name__, "message": str(error), "place": error.place, **where(stack, node)}
            self.write("exception", test=node.nodeid, **found)
            self.write("result", test=node.nodeid, outcome="failed", seconds=self.seconds, reason="")
            self.is_experiment = False
            self.write("end", exit=HUNG, unused=[])
            self.exit(HUNG)

        return Deadline(self.seconds, give_up)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        """After a test that failed: find out which function is the cause."""
        is_done = yield
        if item.nodeid in self.doubtful:

            def passes() -> bool:
                return all(report.passed for report in runtestprotocol(item, log=False, nextitem=nextitem))

            self.is_experiment, seconds, self.seconds = True, self.seconds, self.shorter
            try:
                with as_found(item):
                    cause = self.experiments.cause_of(task_of(item), passes)
            finally:
                self.is_experiment, self.seconds = False, seconds
            if cause:
                self.write("cause", test=item.nodeid, task=cause.task, symbol=cause.symbol)
        return is_done

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        with self.deadline(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self.seen = LastSides(item.config.rootpath)
        with self.deadline(item), self.seen:
            return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items) -> None:
        if self.order:
            config.hook.pytest_deselected(items=[item for item in items if task_of(item) not in self.order])
            chosen = [item for item in items if task_of(item) in self.order]
            items[:] = sorted(chosen, key=lambda item: self.order.index(task_of(item)))

    def pytest_collection_finish(self, session) -> None:
        self.write("collected", tests={item.nodeid: task_of(item) for item in session.items})

    def pytest_runtest_logstart(self, nodeid: str, location) -> None:
        self.write("start", test=nodeid)

    def pytest_assertrepr_compare(self, config, op: str, left, right) -> list[str]:
        if self.seen:
            self.seen.note(lambda: of_comparison(op, left, right))
        return [f"{value(left)} {op} {value(right)}"]

    def pytest_exception_interact(self, node, call, report) -> None:
        if self.is_experiment:
            return
        error = call.excinfo.value
        found = describe(error, node, self.seen or LastSides(node.config.rootpath))
        self.write("exception", test=node.nodeid, stdout=report.capstdout[-MOST_OUTPUT:], **found)
        if isinstance(error, TookTooLong):
            self._after_a_hang(node.session)
        elif call.when == "call" and not found["task"]:
            self.doubtful.add(node.nodeid)

    def _after_a_hang(self, session) -> None:
        """Wait less for the next test, because code that hangs once usually hangs again; stop after a few."""
        self.hangs += 1
        self.seconds = self.shorter
        if self.hangs == MOST_HANGS:
            session.shouldstop = "several tests do not finish"

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            reason = skip_reason(report) if report.outcome == "skipped" else ""
            self.write("result", test=report.nodeid, outcome=report.outcome, seconds=report.duration, reason=reason)

    def pytest_collectreport(self, report) -> None:
        if report.outcome == "skipped":
            self.write("result", test=report.nodeid, outcome="skipped", seconds=0.0, reason=skip_reason(report))
        elif report.outcome == "failed":
            self.write("broken", test=report.nodeid)

    def pytest_sessionfinish(self, session, exitstatus: int) -> None:
        overlay = json.loads(os.environ.get(course_overlay.OVERLAY, "{}"))
        unused = [name for name, file in overlay.items() if not course_overlay.loaded(name, file)]
        self.write("end", exit=int(exitstatus), unused=unused)


def task_of(item) -> int | None:
    """Return the number of the task that a test is marked with: `@pytest.mark.task(3)`."""
    mark = item.get_closest_marker("task")
    return mark.args[0] if mark else None


def skip_reason(report) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ") or "no reason given"


def pytest_configure(config) -> None:
    path = os.environ.get(REPORT)
    if path and not hasattr(config, "workerinput"):
        if LAST_SECONDS in os.environ:  # so that this process ends even if `check` itself is killed
            faulthandler.dump_traceback_later(float(os.environ[LAST_SECONDS]), exit=True)
        seconds, order = float(os.environ.get(TEST_SECONDS, "15")), json.loads(os.environ.get(ORDER, "[]"))
        config.pluginmanager.register(Reporter(str(Path(path)), seconds, order), "course-reporter")
