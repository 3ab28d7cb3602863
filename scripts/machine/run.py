"""Course machinery. Runs a report's parts one after the other within a time limit, and saves after each.

Tokens come first, and end while a third of the time is left: a lesson that hangs takes that long. A later part that
would not end in time is left out, with the reason; one that hangs is ended when the time is up. Ctrl-C ends the rest.
"""

import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from scripts import ROOT
from scripts.bench.peer_protocol import Peer, PeerError
from scripts.machine import speed
from scripts.machine.schema import Comparison, KernelCheck, Lesson, Model, Rates, Report, Speed, built
from scripts.smoke.processes import Result, run_all, start_warm
from scripts.smoke_all import pick_lessons

from lessons._course.places import Places
from mini_engine.base.errors import UserError

WORKER = ("-m", "scripts.machine.worker")
STOPPED = "the report was stopped with Ctrl-C"
QUICK_LESSONS = ["0", "2", "3", "8", "9", "10"]
GROWTH = {"decode": 0.5, "prefill": 1.0, "shared beginning": 1.0, "compare": 0.5}  # of the time, with the requests
LESSON_SHARE = 1 / 3  # of the time, for a lesson that hangs
Tell = Callable[[str], None]


@dataclass
class Clock:
    """The time limit of a report."""

    limit: float
    began: float

    @property
    def left(self) -> float:
        return max(0.0, self.limit - (time.monotonic() - self.began))

    @property
    def gone(self) -> float:
        return time.monotonic() - self.began


@dataclass
class Step:
    """Something to measure: its name in the progress bar, its part of the report, and the request to the worker.

    kind: steps of one kind scale alike with `at_once`; kernels and speeds each get a new process.
    """

    name: str
    part: Any
    request: dict[str, Any]
    kind: str
    at_once: int = 1


class Run:
    """A report in the making. `save` is called with the report after each step, `tell` with the name of the next."""

    def __init__(self, report: Report, limit: float, save: Callable[[Report], None], tell: Tell) -> None:
        self.report, self.save, self.tell = report, save, tell
        self.clock = Clock(limit, time.monotonic())
        self.lessons = pick_lessons(Places.find(), QUICK_LESSONS if report.quick else None)
        self.kernels, self.measured = list(kernel_steps(report)), list(speed_steps(report))
        self.took: dict[str, tuple[int, float]] = {}  # the last step of each kind: its requests, seconds of a round
        report.lessons = [Lesson(one.number, one.title, "missing", why=STOPPED) for one in self.lessons]

    @property
    def num_steps(self) -> int:
        """The number of calls of `tell`."""
        return len(self.lessons) + len(self.kernels) + len(self.measured) + 1

    def everything(self) -> None:
        """Run all parts. KeyboardInterrupt propagates; results so far are in the report."""
        try:
            self.tokens()
            self.all_kernels()
            self.speeds()
            self.report.finished = True
        finally:
            self.keep()

    def keep(self) -> None:
        """Save the results so far."""
        self.report.seconds = round(self.clock.gone, 1)
        self.save(self.report)

    def tokens(self) -> None:
        """Run the lessons' smoke scripts."""
        self.tell("tokens of the lessons")
        numbers = [lesson.number for lesson in self.lessons]
        patience = self.clock.limit * LESSON_SHARE
        runs = run_all(self.lessons, Places.find(), start_warm(), timeout=patience)
        with closing(cast("Generator[Result, None, None]", runs)) as results:
            for result in results:
                self.report.lessons[numbers.index(result.lesson.number)] = of_lesson(result)
                self.keep()
                self.tell(f"tokens of the lessons: {result.lesson.title}")
                if self.clock.left < patience:  # the next one may take this long
                    break
        for lesson in self.report.lessons:
            if lesson.status == "missing":
                lesson.why = f"there was no time: {self.clock.left:.0f} s were left"

    def all_kernels(self) -> None:
        """Compare the kernels with the reference. After a crash, the rest run in a new process."""
        steps = list(self.kernels)
        while steps:
            with Peer("kernels", worker=WORKER) as peer:
                while steps and self.one(peer, steps.pop(0)):
                    pass

    def speeds(self) -> None:
        """Measure speeds, and on a GPU the comparisons."""
        if not self.measured:
            return
        with Peer("speeds", worker=WORKER) as peer:
            self.tell("a model of random weights")
            try:
                said = peer.ask({"do": "load", "quick": self.report.quick}, max(1.0, self.clock.left))["answer"]
            except PeerError as why:
                for step in self.measured:
                    step.part.status, step.part.why = "failed", sentence(f"no model could be measured: {why}")
                return
            self.report.model, self.report.rates = built(Model, said["model"], "it"), built(Rates, said["rates"], "it")
            lost = ""
            for step in self.measured:
                if lost:
                    step.part.status, step.part.why = "failed", lost
                elif not self.one(peer, step):
                    lost = sentence(f"the process ended before, in {step.name}")

    def one(self, peer: Peer, step: Step) -> bool:
        """Run a step. Return True if its process can go on."""
        self.tell(step.name)
        if short := self.too_long(step):
            step.part.why = short
            return True
        began, alive = time.monotonic(), True
        try:
            vars(step.part).update(peer.ask(step.request, max(1.0, self.clock.left))["answer"])
        except PeerError as why:
            step.part.status, step.part.why = "failed", sentence(str(why))
            alive = still_runs(peer)
        rounds = getattr(step.part, "runs", 0) + 1  # one round warms up
        self.took[step.kind] = step.at_once, (time.monotonic() - began) / rounds
        self.keep()
        return alive

    def too_long(self, step: Step) -> str:
        """Return why there is no time for a step; "" if there is."""
        last, seconds = self.took.get(step.kind, (step.at_once, 0.0))
        expected = seconds * (1 + (step.at_once / last - 1) * GROWTH.get(step.kind, 0))
        if self.clock.left > max(1.0, expected):
            return ""
        left = f"{self.clock.left:.0f} of {self.clock.limit:.0f} s were left"
        return f"there was no time: it takes about {expected:.0f} s, and {left}" if expected > 1 else f"only {left}"


def still_runs(peer: Peer) -> bool:
    """Return True if a process that answered with an error is still alive. A killed one needs a moment to end."""
    try:
        peer.process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return True
    return False


def of_lesson(result: Result) -> Lesson:
    """Return the result of a smoke script."""
    lesson = result.lesson
    device = str(result.report.get("device", ""))
    found = Lesson(lesson.number, lesson.title, "ok", device, result.tokens, result.equal_tokens)
    found.seconds = round(result.seconds, 1)
    if not result.ok:
        faults = [*result.report.get("faults", []), *result.not_exercised]
        unequal = f"{result.tokens - result.equal_tokens} of {result.tokens} tokens differ from Hugging Face's"
        last = [line for line in result.output.strip().splitlines() if line.strip()]
        says = faults[0] if faults else unequal if result.report else last[-1] if last else "it printed nothing"
        found.status, found.why = "failed", sentence(says)
    return found


def sentence(text: str) -> str:
    """Return a text as one line that fits in a report, without this machine's paths."""
    line = " ".join(text.split())
    for path, name in ((str(ROOT), "the repository"), (str(Path.home()), "~")):
        line = line.replace(path, name) if len(path) > 1 else line
    return line if len(line) <= 300 else line[:299] + "…"


def kernel_steps(report: Report) -> Iterator[Step]:
    """Yield a step for each kernel, and put its part into the report."""
    from scripts.machine.kernels import asked

    for what in asked():
        part = KernelCheck(f"{what['group']}: {what['name']}", what["dtype"], what["device"], "missing", why=STOPPED)
        report.kernels.append(part)
        yield Step(f"{part.name}, {part.dtype} on {part.device}", part, {"do": "kernel", **what}, "kernel")


def speed_steps(report: Report) -> Iterator[Step]:
    """Yield a step for each load, and with a GPU for each comparison, and put its part into the report."""
    seconds = 0.5 if report.quick else 8.0
    for load in speed.LOADS:
        for at_once in speed.AT_ONCE:
            part = Speed(load, at_once, "missing", why=STOPPED)  # type: ignore[arg-type]
            report.speeds.append(part)
            request = {"do": "speed", "load": load, "at_once": at_once, "seconds": seconds}
            yield Step(f"{load}, {at_once} at once", part, request, load, at_once)
    for first, second in speed.PAIRS if report.machine.gpu else ():
        for at_once in speed.AT_ONCE:
            part = Comparison(first, second, at_once, "missing", why=STOPPED)
            report.comparisons.append(part)
            request = {"do": "compare", "first": first, "second": second, "at_once": at_once, "seconds": seconds}
            yield Step(f"{first} against {second}, {at_once} at once", part, request, "compare", at_once)


def check_place(folder: Path) -> None:
    """Raise UserError unless files can be written to a folder, which is created if necessary."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / "report.json.new"
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {folder}: no file can be written there ({error.strerror}); name another") from error
