"""Course machinery. Code under `check` that takes too long: it is stopped, and a task is named only on evidence.

Protects students from a check that never ends, and from being told on a slow or busy machine that their code does not.
"""

import sys
import time
from unittest.mock import patch

import pytest

from lessons._course import limits
from lessons._course.limits import MOST_TIMES, USUAL_SECONDS, TotalLimit, slowness
from lessons._course.runner import Spawned
from tests.course.toy import Toy, check, states, words
from tests.processes import has_ended, wait_for


@pytest.mark.parametrize("times, expected", [(0.5, 1.0), (3.0, 3.0)])
def test_limits_grow_with_the_processor_time_that_a_sample_takes(monkeypatch, times, expected):
    clock = iter([7.0, 7.0 + times * USUAL_SECONDS])
    monkeypatch.setattr(limits.time, "process_time", lambda: next(clock))
    assert slowness() == pytest.approx(expected)


@pytest.mark.parametrize("busy, ends", [(1.0, 300), (4.0, 1200), (99.0, 300 * MOST_TIMES)])
def test_a_whole_check_may_take_longer_on_a_busy_machine(monkeypatch, busy, ends):
    now = [50.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(limits, "slowness", lambda: 1.0)
    monkeypatch.setattr(limits, "busyness", lambda: busy)
    limit = TotalLimit(300)
    now[0] += ends - 1
    assert not limit.is_over()
    now[0] += 2
    assert limit.is_over()


RETURN = "        return taken"
LOOPS = {  # a change of the finished file, the task whose call does not end, and what stands where it was stopped
    "a task": ("        while seats:", "        while True:\n            continue", 3, "in give_back:  continue"),
    "the top of the file": ("FIRST = 0", "while True: pass", None, ":5"),
    "what catches everything": (
        RETURN,
        "        while True:\n"
        # Python looks for exceptions at calls: here, inside the try.
        "            try: any(map(lambda x: False, iter(int, 1)))\n            except BaseException: pass",
        2,
        "any(map(",
    ),
    "what only the smoke script meets": (RETURN, f"        while n == 5:\n            pass\n{RETURN}", 2, ":36"),
}


@pytest.mark.parametrize(
    "loop", [pytest.param(name, marks=pytest.mark.nightly if "smoke" in name else ()) for name in LOOPS]
)
def test_an_endless_loop_is_stopped_and_found(loop, toy):
    old, new, task, where = LOOPS[loop]
    toy.write_wrong(old, new)
    verdict = check(toy, test_seconds=0.5)
    assert not verdict.passed and (verdict.advice.result.status, verdict.advice.result.task) == ("hung", task)
    assert verdict.advice.where.startswith("work/l0/seats.py:") and where in verdict.advice.where


def test_after_several_hangs_the_remaining_tests_are_not_run(toy):
    toy.edit("tests/l0/test_seats.py", '"x", [1, 5]', '"x", range(9)')
    toy.write_wrong("double(x: int) -> int: return 2 * x", "double(x):\n    while x == x: pass")
    verdict = check(toy, test_seconds=0.3, everything=True)
    assert [r.outcome for r in verdict.report.results].count("not run") >= 6
    assert states(verdict)[0] == "failing" and not verdict.passed


UNTIL_RIGHT = """@pytest.mark.task(1)
def test_until_it_is_right():
    while double(2) != {expected}:
        pass


"""


@pytest.mark.nightly
@pytest.mark.parametrize("expected, status", [(4, "hung"), (5, "course_error")])
def test_a_test_that_goes_on_though_no_call_does_is_no_tasks(toy, expected, status):
    toy.edit("tests/l0/test_seats.py", "def test_of_no", UNTIL_RIGHT.format(expected=expected) + "def test_of_no")
    toy.write_wrong("int: return 2 * x", "int: return 2 * x if x != 2 else 7")
    verdict = check(toy, test_seconds=0.5)
    assert (verdict.advice.result.status, verdict.advice.result.task) == (status, None)


class Clock:
    """Replaces the limits' `time` module: the time limit is reached as soon as `condition` holds."""

    def __init__(self, condition) -> None:
        self.condition = condition
        self.process_time = time.process_time

    def monotonic(self) -> float:
        return time.monotonic() + (1e9 if self.condition() else 0)


def check_until(toy: Toy, condition):
    with patch("lessons._course.limits.time", Clock(condition)):
        return check(toy, launch=Spawned)


def test_a_call_that_cannot_be_interrupted_is_killed_at_the_time_limit(toy):
    seen = toy.places.root / "seen"
    toy.write_wrong(
        "        return taken",
        f"        import time\n        open({str(seen)!r}, 'w').close()\n        time.sleep(600)",
    )
    verdict = check_until(toy, seen.exists)
    assert (verdict.advice.result.status, verdict.advice.result.task) == ("hung", None)
    assert "take_hands_out" in verdict.advice.test
    assert verdict.report.count("not run") > 0 and not verdict.passed


@pytest.mark.skipif(sys.platform == "win32", reason="looks up a process by id, the POSIX way")
def test_nothing_is_left_running_after_the_time_limit(toy):
    seen = toy.places.root / "pid"
    command = f"import os, time; open({str(seen)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    start = f"        import subprocess, sys\n        subprocess.run([sys.executable, '-c', {command!r}])"
    toy.write_wrong("        return taken", start)
    check_until(toy, lambda: seen.exists() and seen.read_text(encoding="utf-8"))
    wait_for("the process is gone", lambda: has_ended(int(seen.read_text(encoding="utf-8"))))


def test_an_endless_loop_at_module_level_is_suspected_at_the_time_limit(toy):
    seen = toy.places.root / "seen"
    toy.write_wrong("FIRST = 0", f"FIRST = open({str(seen)!r}, 'w').close()\nwhile True: pass\n")
    assert "does a loop at the top of a file never end?" in words(check_until(toy, seen.exists))


def test_a_thread_that_never_ends_holds_nothing_up(toy):
    toy.write_top("import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()")
    assert check(toy).passed
