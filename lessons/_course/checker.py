"""Course machinery. Runs one check: the lesson's tests and its smoke script, against the student's files."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lessons._course.catalog import Lesson, Task, covers
from lessons._course.places import CHILD, Places
from lessons._course.report import Failure, Report, SmokeReport, TaskReport, TestResult, smoke_verdict
from lessons._course.runner import Command, Launch, Spawned, run_until
from lessons._course.student import StudentFile, student_files, unwritten

TOTAL_SECONDS = 300.0
TEST_SECONDS = 15.0  # of processor time per test
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUTF8": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the same check for every student, whatever plugins are installed
}
CHOSEN = "only the selected tests were run"
PLUGINS = ["-p", "course_reporter", "-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider"]


Watcher = Callable[[dict[str, Any]], None]


class Check:
    """One run of a lesson's tests and smoke script.

    Args:
        launch: starts a process; spawns a new one by default.
        watcher: called with each event (`{"event": "collected", "tests": […]}` and so on).
        only: the tests to run, named as in lesson.toml. By default all tests of the lesson, then the smoke script.
        files: files that replace the reference; by default the student's.
        blocked: maps module names that must not be imported to the reason.
    """

    def __init__(
        self,
        lesson: Lesson,
        places: Places,
        *,
        launch: Launch = Spawned,
        watcher: Watcher = lambda event: None,
        only: Iterable[str] = (),
        seconds: float = TOTAL_SECONDS,
        test_seconds: float = TEST_SECONDS,
        files: list[StudentFile] | None = None,
        blocked: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.lesson = lesson
        self.places = places
        self.launch = launch
        self.watcher = watcher
        self.only = list(only)
        self.files = student_files(lesson, places) if files is None else files
        self.seconds = seconds
        self.test_seconds = test_seconds
        self.blocked = dict(blocked)
        self.events: dict[str, TestResult] = {}
        self.report = Report(lesson)

    def run(self) -> Report:
        """Run everything. Ends at the time limit even if the student's code does not."""
        started = time.monotonic()
        deadline = started + self.seconds
        with tempfile.TemporaryDirectory(prefix="lessons-", ignore_cleanup_errors=True) as folder:
            self._run_tests(Path(folder), deadline)
            self.report.results = list(self.events.values())
            blank = unwritten(self.lesson, self.files)
            self.report.tasks = [self._task_report(task, blank) for task in self.lesson.tasks]
            reason = self._why_no_smoke(blank)
            if reason:
                self.report.smoke = SmokeReport("NOT CHECKED", reason)
            else:
                self.watcher({"event": "smoke"})
                self.report.smoke = self._run_smoke(Path(folder), deadline)
        self.report.seconds = time.monotonic() - started
        return self.report

    def _environment(self) -> dict[str, str]:
        return python_environment(self.places) | {
            "KV_COURSE_OVERLAY": json.dumps({file.import_name: str(file.path) for file in self.files}),
            "KV_COURSE_BLOCKED": json.dumps(self.blocked),
            "KV_COURSE_TEST_SECONDS": str(self.test_seconds),
            "KV_COURSE_LAST_SECONDS": str(self.seconds + 10),
        }

    def _run_tests(self, folder: Path, deadline: float) -> None:
        log, out, err = folder / "events.jsonl", folder / "tests.out", folder / "tests.err"
        log.touch()
        chosen = self.only or self.lesson.tests
        options = [*PLUGINS, "-q", "--no-header", "--tb=line"]  # course_reporter records what failed and where
        arguments = ["-m", "pytest", *options, "--rootdir", str(self.places.root), *chosen]
        command = Command(arguments, self._environment() | {"KV_COURSE_REPORT": str(log)}, self.places.root, out, err)
        with log.open(encoding="utf-8") as lines:
            tail = Tail(lines, self._take)
            code = run_until(self.launch(command), deadline, tail.read)
        self._settle(code, tail, (out, err))

    def _take(self, event: dict[str, Any]) -> None:
        """Record one event of the test run."""
        kind, test = event["event"], event.get("test", "")
        if kind == "collected":
            self.events |= {name: TestResult(name, "not run") for name in event["tests"]}
        elif kind == "start":
            self.events[test].outcome = "hung"
        elif kind == "exception":
            self._result(test).failure = Failure(**{k: v for k, v in event.items() if k not in ("event", "test")})
        elif kind == "result":
            result = self._result(test)
            result.seconds += event["seconds"]
            if not (result.outcome == "failed" and event["outcome"] == "passed"):
                result.outcome, result.reason = event["outcome"], event["reason"]
        elif kind == "broken":
            self._result(test).outcome = "failed"
        self.watcher(event)

    def _result(self, test: str) -> TestResult:
        return self.events.setdefault(test, TestResult(test, "failed"))

    def _settle(self, code: int | None, tail: "Tail", outputs: tuple[Path, Path]) -> None:
        """After the tests: find out whether the right ones ran, and whether the run was complete."""
        end = tail.last if tail.last.get("event") == "end" else None
        running = next((result for result in self.events.values() if result.outcome == "hung"), None)
        if code is not None and running:
            what = "Python itself exited here" if end is None else "The tests were interrupted here"
            running.outcome = "failed"
            running.failure = Failure("Crash", f"{what} (exit code {code}).\n{last_lines(*outputs)}")
        elif end is None and code is not None:
            self.report.trouble = f"the test run ended early (exit code {code}):\n{last_lines(*outputs)}"
        elif not self.events and code is None:
            self.report.trouble = "time ran out before the first test; does a loop at the top of a file never end?"
        elif not self.events:
            self.report.trouble = f"no tests were found:\n{last_lines(*outputs)}"
        elif end and end["unused"] and not self.only and self._outcomes() <= {"passed", "skipped"}:
            self.report.trouble = f"the tests never imported your version of {', '.join(end['unused'])}"

    def _outcomes(self) -> set[str]:
        return {result.outcome for result in self.events.values()}

    def _task_report(self, task: Task, blank: set[int]) -> TaskReport:
        results = [
            result
            for result in self.events.values()
            if any(covers(test, result.test) or covers(result.test, test) for test in task.tests)
        ]
        outcomes = {result.outcome for result in results}
        if task.number in blank:
            state = "not written"
        elif outcomes & {"failed", "hung"}:
            state = "failing"
        else:
            state = "done" if "passed" in outcomes and "not run" not in outcomes else "NOT CHECKED"
        return TaskReport(task, state, results)

    def _why_no_smoke(self, blank: set[int]) -> str:
        open_tasks = ", ".join(str(number) for number in sorted(blank))
        if self.only:
            return CHOSEN
        if not self.lesson.smoke:
            return "this lesson has no smoke script"
        if blank:
            return f"task {open_tasks} is not written" if len(blank) == 1 else f"tasks {open_tasks} are not written"
        if self.report.trouble or self.report.count("hung", "not run"):
            return "the tests did not finish"
        if "passed" not in self._outcomes():
            return "no test passed"
        return ""

    def _run_smoke(self, folder: Path, deadline: float) -> SmokeReport:
        out, err = folder / "smoke.out", folder / "smoke.err"
        arguments = [*self.lesson.smoke, "--json"]
        code = run_until(
            self.launch(Command(arguments, self._environment(), self.places.root, out, err)), deadline, lambda: None
        )
        if code is None:
            return SmokeReport("failed", f"{arguments[0]} did not finish in the remaining time")
        if code in (0, 1) and (found := read_json(out)):
            return smoke_verdict(found)
        last = last_lines(out, err, count=1)
        return SmokeReport("failed", f"{arguments[0]} exited with code {code}: {last}", output=last_lines(out, err))


def python_environment(places: Places) -> dict[str, str]:
    """Return the environment for child processes: this repository first on the path, no network, one thread."""
    paths = [str(CHILD), str(places.root), os.environ.get("PYTHONPATH", "")]
    return QUIET | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",  # the models are too small to gain from a second thread
    }


class Tail:
    """Follows a growing file of JSON lines; takes complete lines only."""

    def __init__(self, file, take: Watcher) -> None:
        self.file = file
        self.take = take
        self.rest = ""
        self.last: dict[str, Any] = {}

    def read(self) -> None:
        *lines, self.rest = (self.rest + self.file.read()).split("\n")
        for line in lines:
            self.last = json.loads(line)
            self.take(self.last)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the last line that is a JSON object. The student's own prints come before it."""
    for line in reversed(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue
    return None


def last_lines(*paths: Path, count: int = 12) -> str:
    """Return the last lines of a process's output."""
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace").strip() for path in paths)
    return "\n".join(text.strip().splitlines()[-count:])
