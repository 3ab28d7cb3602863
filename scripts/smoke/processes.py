"""Course machinery. Runs the lessons' smoke scripts in separate processes, several at a time.

On Linux they are forked from one process that has imported torch and transformers, because the imports take longer
than most scripts. Elsewhere each script imports them itself.
"""

import json
import multiprocessing.forkserver
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.smoke.report import equal_prefix

from lessons._course.catalog import Lesson
from lessons._course.environment import python_environment
from lessons._course.places import Places
from lessons._course.runner import POLL_SECONDS, Command, Launch, Spawned
from lessons._course.warm import warm_launch

HEAVY = [  # slow to import, and not part of the course, whose modules may be broken
    "torch",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "openai.types",
    "fastapi",
    "uvicorn",
]


@dataclass
class Result:
    """The result of a lesson's smoke script.

    report: the object that it printed, empty if it printed none.
    is_own_run: True if the script ran without further options. Such a run exercises everything, or has failed.
    """

    lesson: Lesson
    exit_code: int
    seconds: float
    output: str
    report: dict[str, Any] = field(default_factory=dict)
    is_own_run: bool = True

    @property
    def ok(self) -> bool:
        is_whole = not (self.is_own_run and self.not_exercised)
        return self.exit_code == 0 and self.report.get("match") is True and is_whole

    @property
    def not_exercised(self) -> list[str]:
        """The features that the run did not exercise, a sentence each."""
        return self.report.get("not_exercised", [])

    @property
    def storage(self) -> str:
        return str(self.kv.get("layout", ""))

    @property
    def kv(self) -> dict[str, Any]:
        return self.report.get("kv", {})

    @property
    def tokens(self) -> int:
        """Number of new tokens from Hugging Face, over all requests."""
        return sum(len(request["hf"]) for request in self.report.get("requests", []))

    @property
    def equal_tokens(self) -> int:
        """Number of equal new tokens, counted up to each request's first difference."""
        return sum(equal_prefix(request["ours"], request["hf"]) for request in self.report.get("requests", []))

    def tokens_per_second(self, side: str) -> float | None:
        """Return the speed of `ours` or `hf`; None if the report lacks the time."""
        count = sum(len(request[side]) for request in self.report.get("requests", []))
        seconds = self.report.get("seconds", {}).get(side)
        return count / seconds if seconds else None

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.lesson.number,
            "title": self.lesson.title,
            "storage": self.storage,
            "match": self.ok,
            "exit_code": self.exit_code,
            "tokens": self.tokens,
            "equal_tokens": self.equal_tokens,
            "not_exercised": self.not_exercised,
            "tokens_per_second": {side: self.tokens_per_second(side) for side in ("ours", "hf")},
            "seconds": self.seconds,
            "report": self.report,
        }


def start_warm() -> Launch:
    """Return the fastest way to start scripts here, once everything is imported if they are to be forked."""
    launch = warm_launch()
    if launch is not Spawned:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(HEAVY)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: only this process answers Ctrl-C
        multiprocessing.forkserver.ensure_running()
        signal.signal(signal.SIGINT, before)
        idle = context.Process(target=int)  # a script started now would start after the imports, even after Ctrl-C
        idle.start()
        idle.join()
    return launch


def environment(places: Places, jobs: int) -> dict[str, str]:
    """Return a script's additional environment: its share of the processors, and the network, which models may need."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")}
    return python_environment(places) | own


class Run:
    """A lesson's smoke script with --json, in a separate process. Its output goes to files in `folder`."""

    def __init__(self, lesson: Lesson, extra: Sequence[str], launch: Launch, command: Command, timeout: float) -> None:
        self.lesson, self.extra, self.command, self.timeout = lesson, extra, command, timeout
        self.job = launch(command)
        self.started = time.perf_counter()

    def result(self) -> Result | None:
        """Return the script's result; None while it runs. A script that hangs is killed."""
        seconds, code = time.perf_counter() - self.started, self.job.poll()
        if code is None and seconds < self.timeout:
            return None
        self.job.kill()  # and every process that it left behind
        printed, aside = (path.read_text(encoding="utf-8", errors="replace") for path in self.command[-2:])
        if code is None:
            late = f"still running after {self.timeout:.0f} s, so it was stopped"
            return Result(self.lesson, 1, seconds, f"{aside}{printed}\n{late}")
        try:
            report = json.loads(printed)
        except json.JSONDecodeError:
            return Result(self.lesson, code or 1, seconds, aside + printed)
        return Result(self.lesson, code, seconds, aside, report, is_own_run=not self.extra)


def run_all(
    lessons: Sequence[Lesson], places: Places, launch: Launch, extra: Sequence[str] = (), jobs=2, timeout=600.0
) -> Iterator[Result]:
    """Run `jobs` scripts at a time and yield each result as it comes. No script survives the end of the iteration."""
    waiting, running, env = list(lessons), [], environment(places, jobs)
    with TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True) as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    lesson = waiting.pop(0)
                    files = (Path(folder, f"{len(waiting)}.{name}") for name in ("out", "err"))
                    command = Command([*lesson.smoke, *extra, "--json"], env, places.root, *files)
                    running.append(Run(lesson, extra, launch, command, timeout))
                time.sleep(POLL_SECONDS)
                for run in list(running):
                    if result := run.result():
                        running.remove(run)
                        yield result
        finally:
            for run in running:
                run.job.kill()
