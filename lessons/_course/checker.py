"""Course machinery. Runs one check: the lesson's tests and its smoke script, against the student's files."""

import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lessons._course.catalog import Lesson, Task
from lessons._course.environment import python_environment
from lessons._course.event_log import Tail, Watcher
from lessons._course.limits import MOST_TIMES, SMOKE_FACTOR, TEST_SECONDS, TOTAL_SECONDS, TotalLimit, slowness
from lessons._course.order import Plan
from lessons._course.output import exit_in_words, last_lines
from lessons._course.places import Places
from lessons._course.report import Failure, Report, SmokeReport, TaskReport, TestResult
from lessons._course.runner import Command, Launch, Spawned, run_until
from lessons._course.smoke import SmokeRun
from lessons._course.student import StudentFile, bodies_of, student_files, unwritten
from lessons._course.task_tests import files_of_tasks

CHOSEN = "only the selected tests were run"
STOPPED = "the tests come first"
PLUGINS = ["-p", "course_reporter", "-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider"]
OPTIONS = [
    "-m",
    "not reference and not ci and not nightly",
    "-q",
    "--no-header",
    "--tb=line",
    "-o",
    "truncation_limit_lines=0",
    "-o",
    "truncation_limit_chars=0",
]


class Check:
    """One run of a lesson's tests and smoke script.

    Args:
        launch: starts a process; spawns a new one by default.
        watcher: called with each event (`{"event": "collected", "tests": {…}}` and so on).
        only: the tests to run, named as for pytest. By default all tests of the lesson, then the smoke script.
        plan: instead of `only`: what to run in which order, up to the first failure.
        seconds: for the whole check; more on a slow or busy machine.
        test_seconds: of processor time per test; by default what suits the machine.
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
        plan: Plan | None = None,
        seconds: float = TOTAL_SECONDS,
        test_seconds: float | None = None,
        files: list[StudentFile] | None = None,
        blocked: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.lesson = lesson
        self.places = places
        self.launch = launch
        self.watcher = watcher
        self.only = list(only)
        self.plan = plan
        self.files = student_files(lesson, places) if files is None else files
        self.seconds = seconds
        self.test_seconds = test_seconds or TEST_SECONDS * slowness()
        self.blocked = dict(blocked)
        self.events: dict[str, TestResult] = {}
        self.filled = plan.filled if plan else frozenset()
        self.blank = unwritten(lesson, self.files) - self.filled
        self.test_files = files_of_tasks(lesson, places.root)
        self.report = Report(
            lesson,
            focus=plan.focus if plan else None,
            is_whole=plan.is_whole if plan else not self.only,
            filled=self.filled,
        )

    def run(self) -> Report:
        """Run everything. Ends at the time limit even if the student's code does not."""
        limit = TotalLimit(self.seconds)
        with ExitStack() as stack:
            options = {"prefix": "lessons-", "ignore_cleanup_errors": True}
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(**options)))
            smoke = stack.enter_context(SmokeRun(self.lesson.smoke, self.places.root, folder, self.launch))
            self._run_tests(folder, limit, smoke)
            self.report.results = list(self.events.values())
            self.report.tasks = [self._task_report(task) for task in self.lesson.tasks]
            reason = self._why_no_smoke()
            if reason:
                self.report.smoke = SmokeReport("NOT CHECKED", reason)
            else:
                self.watcher({"event": "smoke"})
                self._start_smoke(smoke)
                self.report.smoke = smoke.finish(limit)
        self.report.seconds = limit.waited
        return self.report

    def _environment(self) -> dict[str, str]:
        return python_environment(self.places) | {
            "KV_COURSE_OVERLAY": json.dumps({file.import_name: str(file.path) for file in self.files}),
            "KV_COURSE_BLOCKED": json.dumps(self.blocked),
            "KV_COURSE_FILLED": json.dumps(bodies_of(self.lesson, self.files, self.filled)),
            "KV_COURSE_SWAPS": json.dumps(self._swaps()),
            "KV_COURSE_TEST_SECONDS": str(self.test_seconds),
            "KV_COURSE_LAST_SECONDS": str(self.seconds * MOST_TIMES + 10),
        }

    def _swaps(self) -> list[dict[str, Any]]:
        """Return what an experiment may exchange: each written function of a task for the reference's."""
        files = {file.module: file for file in self.files}
        return [
            {"task": task.number, "symbol": target.symbol}
            | {"module": files[target.file].import_name, "file": str(files[target.file].reference)}
            for task in self.lesson.tasks
            for target in task.targets
            if target.file in files and task.number not in self.blank | self.filled
        ]

    def _start_smoke(self, smoke: SmokeRun) -> None:
        smoke.start(self._environment(), self.test_seconds * SMOKE_FACTOR)

    def _run_tests(self, folder: Path, limit: TotalLimit, smoke: SmokeRun) -> None:
        """Run the tests; once those of the first task have passed, the smoke script runs beside the others."""
        log, out, err = folder / "events.jsonl", folder / "tests.out", folder / "tests.err"
        log.touch()
        env = self._environment() | {"KV_COURSE_REPORT": str(log)}
        if self.plan:
            env["KV_COURSE_ORDER"] = json.dumps(self.plan.tasks)
        arguments = ["-m", "pytest", *PLUGINS, *OPTIONS, "--rootdir", str(self.places.root), *self._arguments()]
        command = Command(arguments, env, self.places.root, out, err)
        with log.open(encoding="utf-8") as lines:
            tail = Tail(lines, self._take)

            def each() -> None:
                tail.read()
                if self.plan and self.plan.is_whole and self.lesson.smoke and self._first_task_passed():
                    self._start_smoke(smoke)

            code = run_until(self.launch(command), math.inf, each, lambda: tail.has_ended() or limit.is_over())
        self._settle(code, tail, (out, err))

    def _arguments(self) -> list[str]:
        """Return pytest's arguments: what to collect."""
        if self.plan is None:
            return self.only or list(self.lesson.tests)
        files = [file for number in self.plan.tasks if number for file in self.test_files[number]]
        first = ["-x"] if self.plan.ends_early else []
        return [*first, *(self.lesson.tests if self.plan.is_whole else dict.fromkeys(files))]

    def _first_task_passed(self) -> bool:
        assert self.plan is not None
        results = [result for result in self.events.values() if result.task == self.plan.tasks[0]]
        return bool(results) and all(result.outcome in ("passed", "skipped") for result in results)

    def _take(self, event: dict[str, Any]) -> None:
        """Record one event of the test run."""
        kind, test = event["event"], event.get("test", "")
        if kind == "collected":
            self.events |= {name: TestResult(name, "not run", task=task) for name, task in event["tests"].items()}
        elif kind == "start":
            self.events[test].outcome = "hung"
        elif kind == "exception":
            self._result(test).failure = Failure(**{k: v for k, v in event.items() if k not in ("event", "test")})
        elif kind == "cause" and (failure := self._result(test).failure):
            failure.cause = event["task"], event["symbol"]
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
        if end is not None and code is None:
            code = end["exit"]
        if code is not None and running:
            what = "Python itself stopped in this test" if end is None else "The tests were interrupted here"
            running.outcome = "failed"
            running.failure = Failure("Crash", f"{what} ({exit_in_words(code)}).\n{last_lines(*outputs)}")
        elif end is None and code is not None:
            self.report.trouble = f"{self._early()} ({exit_in_words(code)}).\n{last_lines(*outputs)}"
        elif not self.events and code is None:
            self.report.trouble = "Time ran out before the first test: does a loop at the top of a file never end?"
        elif not self.events:
            self.report.trouble = f"No tests were found.\n{last_lines(*outputs)}"
        elif end and end["unused"] and self.report.is_whole and self._outcomes() <= {"passed", "skipped"}:
            self.report.trouble = f"The tests never imported your version of {', '.join(end['unused'])}."

    def _early(self) -> str:
        before = "before the first test" if not self.events else "between two tests"
        return f"Python itself stopped {before}, by os._exit() or a crash in native code"

    def _outcomes(self) -> set[str]:
        return {result.outcome for result in self.events.values()}

    def _task_report(self, task: Task) -> TaskReport:
        files = self.test_files[task.number]  # one that cannot be imported has no tests, and is a result itself
        results = [r for r in self.events.values() if r.task == task.number or r.test in files]
        outcomes = {result.outcome for result in results}
        if task.number in self.filled:
            state = "left out"
        elif task.number in self.blank:
            state = "not written"
        elif outcomes & {"failed", "hung"}:
            state = "failing"
        else:
            state = "done" if "passed" in outcomes and "not run" not in outcomes else "NOT CHECKED"
        return TaskReport(task, state, results)

    def _why_no_smoke(self) -> str:
        blank = self.blank
        open_tasks = ", ".join(str(number) for number in sorted(blank))
        if not self.report.is_whole and not blank:
            return CHOSEN
        if self.only:
            return CHOSEN
        if not self.lesson.smoke:
            return "this lesson has no smoke script"
        if blank:
            return f"task {open_tasks} is not written" if len(blank) == 1 else f"tasks {open_tasks} are not written"
        if self.report.trouble or self.report.count("hung", "not run"):
            return "the tests did not finish"
        if self.plan and self.plan.ends_early and self.report.first_bad:
            return STOPPED
        if "passed" not in self._outcomes():
            return "no test passed"
        return ""
