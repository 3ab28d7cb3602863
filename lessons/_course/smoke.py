"""Course machinery. Runs a lesson's smoke script beside the tests, and reads what it found."""

import json
import math
import time
from pathlib import Path
from typing import Any

from lessons._course.limits import TotalLimit
from lessons._course.output import exit_in_words, last_lines, shortened
from lessons._course.report import SmokeReport, smoke_verdict
from lessons._course.runner import Command, Launch, run_until

LEAVE_SECONDS = 3.0  # from the result to the end of the process


class SmokeRun:
    """A smoke script in a process of its own, started once and ended with the `with` block.

    Args:
        seconds: of processor time, after which it is stopped.
    """

    def __init__(self, script: tuple[str, ...], root: Path, folder: Path, launch: Launch) -> None:
        self.script, self.root, self.launch = script, root, launch
        self.out, self.err = folder / "smoke.out", folder / "smoke.err"
        self.job = None
        self.seen = 0.0

    def __enter__(self) -> "SmokeRun":
        return self

    def __exit__(self, *exception) -> None:
        if self.job and self.job.poll() is None:
            self.job.kill()

    def start(self, environment: dict[str, str], seconds: float) -> None:
        """Start the script, unless it runs already."""
        if self.job is None:
            self.out.touch()  # a forked process creates its files only once it runs
            self.err.touch()
            env = environment | {"KV_COURSE_RUN_SECONDS": str(seconds)}
            self.job = self.launch(Command([*self.script, "--json"], env, self.root, self.out, self.err))

    def finish(self, limit: TotalLimit) -> SmokeReport:
        """Wait for the script and return its result."""
        assert self.job is not None, "start comes first"
        code = run_until(self.job, math.inf, lambda: None, lambda: self._is_done() or limit.is_over())
        printed = self.out.read_text(encoding="utf-8", errors="replace")
        found, rest = split_result(printed)
        if found and code in (0, 1, None):
            aside = self.err.read_text(encoding="utf-8", errors="replace")
            return smoke_verdict(found, shortened(f"{rest}\n{aside}"))
        name = self.script[0]
        if code is None:
            return SmokeReport("hung", f"{name} did not finish in the remaining time")
        output = last_lines(self.out, self.err)
        last = (output.splitlines() or [""])[-1]
        if "TookTooLong: " in last:
            return SmokeReport("hung", f"{name} {last.partition('TookTooLong: ')[2]}", output=output)
        return SmokeReport("failed", f"{name} ended without a result ({exit_in_words(code)}): {last}", output=output)

    def _is_done(self) -> bool:
        """Whether the result has been there for a while: a thread that never ends must not keep the process."""
        if not self.seen:
            found, _ = split_result(self.out.read_text(encoding="utf-8", errors="replace"))
            self.seen = time.monotonic() if found else 0.0
        return bool(self.seen) and time.monotonic() > self.seen + LEAVE_SECONDS


def split_result(printed: str) -> tuple[dict[str, Any] | None, str]:
    """Return the last JSON object with a lesson's number in a script's output, and everything else in it."""
    decoder, start = json.JSONDecoder(), len(printed)
    while (start := printed.rfind("{", 0, start)) >= 0:
        if not printed.startswith('{"lesson":', start):
            continue
        try:
            found, end = decoder.raw_decode(printed, start)
        except json.JSONDecodeError:
            continue
        return found, (printed[:start] + printed[end:]).strip()
    return None, printed.strip()
