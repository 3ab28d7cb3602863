"""Course machinery. A pytest plugin that logs events as JSON lines and stops tests that run too long."""

import ctypes
import faulthandler
import json
import os
import re
import threading
import time
import traceback
from pathlib import Path

import course_overlay
import pytest

REPORT = "KV_COURSE_REPORT"
TEST_SECONDS = "KV_COURSE_TEST_SECONDS"
LAST_SECONDS = "KV_COURSE_LAST_SECONDS"
TASK = re.compile(r"Lesson \d+, task (\d+)\b")
LONGEST_TEXT = 6000
MOST_HANGS = 3
AFTER_A_HANG_SECONDS = 4.0
LOOK_SECONDS = 0.1


class TookTooLong(BaseException):
    """Raised inside a test that does not finish. A BaseException, so `except Exception` does not catch it."""


class Deadline:
    """Raises TookTooLong in the thread that entered it, after `seconds` of this process's processor time.

    Processor time, so that no test fails because the machine is busy. Stops Python code, but not a C call or a wait.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.over = threading.Event()
        self.lock = threading.Lock()

    def __enter__(self) -> "Deadline":
        self.thread = threading.get_ident()
        self.end = time.process_time() + self.seconds
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        with self.lock:
            self.over.set()

    def _look(self) -> None:
        while not self.over.wait(LOOK_SECONDS):
            if time.process_time() > self.end:
                self._fire()
                return

    def _fire(self) -> None:
        with self.lock:
            if not self.over.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(TookTooLong))


class Reporter:
    """The plugin: writes one line per event, flushed, so that `check` can follow along."""

    def __init__(self, path: str, seconds: float) -> None:
        self.path = path
        self.seconds = seconds
        self.hangs = 0

    def write(self, event: str, **fields) -> None:
        with Path(self.path).open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        with Deadline(self.seconds):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        with Deadline(self.seconds):
            return (yield)

    def pytest_collection_finish(self, session) -> None:
        self.write("collected", tests=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str, location) -> None:
        self.write("start", test=nodeid)

    def pytest_exception_interact(self, node, call, report) -> None:
        self.write("exception", test=node.nodeid, stdout=report.capstdout[-2000:], **describe(call.excinfo.value, node))
        if isinstance(call.excinfo.value, TookTooLong):
            self._after_a_hang(node.session)

    def _after_a_hang(self, session) -> None:
        """Wait less for the next test, because code that hangs once usually hangs again; stop after a few."""
        self.hangs += 1
        self.seconds = min(self.seconds, AFTER_A_HANG_SECONDS)
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


def skip_reason(report) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ") or "no reason given"


def describe(error: BaseException, node) -> dict:
    """Describe a failure: its message, the unwritten task it ran into, and its traceback."""
    error = heart_of(error)
    task = next((m[1] for e in chain(error) if isinstance(e, NotImplementedError) and (m := TASK.search(str(e)))), None)
    stack = traceback.extract_tb(error.__traceback__)
    ours = next((i for i, frame in enumerate(stack) if is_ours(Path(frame.filename), node.config.rootpath)), 0)
    return {
        "type": type(error).__name__,
        "message": str(error)[:LONGEST_TEXT],
        "notes": "\n".join(getattr(error, "__notes__", ()))[:LONGEST_TEXT],
        "task": int(task) if task else None,
        "frames": [(frame.filename, frame.lineno, frame.name, frame.line) for frame in stack[ours:]],
        "syntax": [error.filename, error.lineno] if isinstance(error, SyntaxError) else None,
    }


def is_ours(path: Path, root: Path) -> bool:
    """Whether a frame belongs to the course: not to pytest, wherever it is installed, and not to this plugin."""
    return path.is_relative_to(root) and "site-packages" not in path.parts and path.parent != Path(__file__).parent


def heart_of(error: BaseException) -> BaseException:
    """Return the underlying error: what broke a test file's import, or the first of hypothesis' exception group."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif type(error).__name__ == "CollectError" and error.__cause__:
            error = error.__cause__
        else:
            return error


def chain(error: BaseException | None):
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def pytest_configure(config) -> None:
    path = os.environ.get(REPORT)
    if path and not hasattr(config, "workerinput"):
        if LAST_SECONDS in os.environ:  # so that this process ends even if `check` itself is killed
            faulthandler.dump_traceback_later(float(os.environ[LAST_SECONDS]), exit=True)
        config.pluginmanager.register(Reporter(path, float(os.environ.get(TEST_SECONDS, "15"))), "course-reporter")
