"""Course machinery. The run of all smoke scripts: what it shows, what it counts, and when it fails.

Protects the claim that all tokens are equal: no failed, hanging or missing script may look like a success.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from scripts import ROOT, smoke_all
from scripts.smoke import processes
from scripts.smoke.processes import run_all

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from lessons._course.runner import Spawned
from tests.processes import has_ended, wait_for
from tests.support import ran

LESSON = """
id = "l{number}_example"
number = {number}
title = "Example {number}"
summary = "an example"
minutes = 1
modules = []
tests = []
smoke = ["smoke.py", "{number}"]
"""
SMOKE = """
import json, sys
number = int(sys.argv[1])
if "--broken" in sys.argv:
    raise SystemExit("the checkpoint is gone")
ours = [5, 6, 7, 8] if "--differ" not in sys.argv else [5, 6, 9, 8]
request = dict(prompt_ids=[1], ours=ours, hf=[5, 6, 7, 8], match=ours == [5, 6, 7, 8], first_divergence=None)
unused = ["no request was preempted"] if "--easy" in sys.argv else []
kv = dict(layout="[slots, heads, dim]", bytes=1048576, bytes_per_token=256)
print(json.dumps(dict(lesson=number, model="m", dtype="float32", device="cpu", match=request["match"],
                      requests=[request, request], kv=kv, not_exercised=unused,
                      seconds=dict(load=1.0, ours=0.5, hf=2.0))))
sys.exit(0 if request["match"] else 1)
"""


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of three lessons, of which the second has no smoke script yet."""
    for number in (10, 2, 1):
        folder = tmp_path / "lessons" / f"l{number}_example"
        folder.mkdir(parents=True)
        text = LESSON.format(number=number)
        (folder / "lesson.toml").write_text(text if number != 2 else text.split("smoke =")[0], encoding="utf-8")
    (tmp_path / "smoke.py").write_text(SMOKE, encoding="utf-8")
    monkeypatch.setenv("KV_COURSE_ROOT", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(smoke_all, "start_warm", lambda: Spawned)
    return tmp_path


def run(capfd, *arguments: str) -> tuple[int, str, str]:
    code = smoke_all.main(arguments)
    return code, *capfd.readouterr()


def start() -> subprocess.Popen:
    """Start `smoke_all.py` as a command in a process group of its own. Before it forks, it imports only `heavy`."""
    lines = ["import sys", f"sys.path.insert(0, {str(ROOT)!r})", "from scripts import smoke_all"]
    lines += ["from scripts.smoke import processes", "processes.HEAVY[:] = ['heavy']"]
    command = [sys.executable, "-c", "\n".join([*lines, "sys.exit(smoke_all.main([]))"])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    env = os.environ | {"PYTHONPATH": os.environ["KV_COURSE_ROOT"]}
    return subprocess.Popen(command, start_new_session=True, env=env, **pipes)


def begins(course: Path, script: str) -> None:
    """Let both scripts begin with this code, in which `folder` is the course's."""
    first = f"import os, pathlib, subprocess, sys, time\nfolder = pathlib.Path({str(course)!r})\n"
    (course / "smoke.py").write_text(first + script + SMOKE, encoding="utf-8")


CHILD = """
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep)
(folder / f"part{sys.argv[1]}").write_text(f"{os.getpid()} {child.pid}")
(folder / f"part{sys.argv[1]}").rename(folder / f"pids{sys.argv[1]}")
"""


def pids_of(course: Path) -> list[int]:
    return [int(pid) for path in course.glob("pids*") for pid in path.read_text(encoding="utf-8").split()]


def wait_until_gone(course: Path) -> None:
    wait_for("no script runs", lambda: all(map(has_ended, pids_of(course))))


def test_the_table_has_a_row_for_each_lesson_in_order(course, capfd):
    code, out, err = run(capfd)
    assert code == 0
    rows = [line for line in out.splitlines() if "Example" in line]
    assert ["Example 1 " in rows[0], "Example 10" in rows[1]] == [True, True] and len(rows) == 2
    for text in ("8/8", "[slots, heads, dim]", "1,048,576", " 16 ", " 4 "):  # 8 tokens in 0.5 s and in 2 s
        assert text in rows[0], f"the row lacks {text!r}: {rows[0]}"
    assert "Every token is equal: all 2 lessons give Hugging Face's answers, 16 tokens in total." in out
    assert "lesson 1: Example 1: ok" in err, "in a pipe each lesson's end is a line on stderr"


def test_a_difference_fails_and_is_located(course, capfd):
    code, out, _ = run(capfd, "--only", "10", "--", "--differ")
    assert code == 1
    assert "4/8" in out, "tokens count as equal up to each request's first difference"
    assert "request 0: new token 2 differs: Hugging Face [7], ours [9]" in out
    assert "1 of 1 lessons failed: 10." in out


def test_what_was_not_exercised_is_told_and_fails_only_the_scripts_own_run(course, capfd):
    code, out, _ = run(capfd, "--only", "1", "--", "--easy")
    assert code == 0 and "NOT EXERCISED  lesson 1: no request was preempted" in out
    toml = course / "lessons/l1_example/lesson.toml"
    toml.write_text(toml.read_text(encoding="utf-8").replace('"1"]', '"1", "--easy"]'), encoding="utf-8")
    code, out, _ = run(capfd, "--only", "1")
    assert code == 1 and "no request was preempted" in out and "1 of 1 lessons failed: 1." in out


@pytest.mark.nightly
@pytest.mark.parametrize("number", [5, 8, 11, 12, 13, 14, 20])
def test_the_own_run_of_a_script_exercises_everything(number):
    lesson = next(lesson for lesson in read_lessons(Places.find()) if lesson.number == number)
    [found] = run_all([lesson], Places.find(), Spawned)
    assert found.report["match"] and found.not_exercised == [], found.not_exercised


def test_a_crashing_script_is_shown_with_its_own_output(course, capfd):
    code, out, _ = run(capfd, "--", "--broken")
    assert code == 1
    assert out.count("the checkpoint is gone") == 2 and "2 of 2 lessons failed: 1, 10." in out


def test_a_script_that_hangs_is_killed(course, capfd, monkeypatch):
    begins(course, "print('so far', flush=True); (folder / 'hangs').touch(); time.sleep(600)")
    late = lambda: 600.0 if (course / "hangs").exists() else 0.0  # noqa: E731
    monkeypatch.setattr(processes, "time", SimpleNamespace(perf_counter=late, sleep=time.sleep))
    code, out, _ = run(capfd, "--only", "1", "--timeout", "500")
    assert code == 1 and "so far" in out and "500 s" in out


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


@LINUX
def test_what_a_script_leaves_running_ends_with_it(course):
    begins(course, CHILD + "os._exit(3)")
    assert start().wait(60) == 1
    assert len(pids_of(course)) == 4
    wait_until_gone(course)


@LINUX
@pytest.mark.parametrize("running", [False, True], ids=["at the start", "in the scripts"])
def test_ctrl_c_stops_everything_at_once(course, running):
    """The terminal sends it to the whole process group, so to the process that scripts are forked from as well."""
    begins(course, CHILD + "while True:\n    try: time.sleep(600)\n    except KeyboardInterrupt: pass\n")
    if not running:
        heavy = f"import pathlib, time\npathlib.Path({str(course)!r}, 'importing').touch()\ntime.sleep(2)"
        (course / "heavy.py").write_text(heavy, encoding="utf-8")
    process = start()
    if running:
        wait_for("both scripts and what they started", lambda: len(pids_of(course)) == 4)
    else:
        wait_for("the imports", (course / "importing").exists)
    os.killpg(process.pid, signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert (process.returncode, err) == (130, "Stopped.\n"), err
    wait_until_gone(course)


@pytest.mark.parametrize("only", ["3", "x"])
def test_a_lesson_that_is_not_there_is_refused_in_one_line(course, capfd, only):
    code, out, err = run(capfd, "--only", only)
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and repr(only) in err


def test_every_lesson_of_the_course_has_a_smoke_script():
    places = Places.find()
    for lesson in read_lessons(places):
        assert lesson.smoke, f"{places.shown(lesson.folder)}/lesson.toml names no smoke script"
        assert (places.root / lesson.smoke[0]).exists(), f"{lesson.smoke[0]} is not there"


@pytest.mark.ci
@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "scripts").glob("l*_smoke.py")))
def test_bad_arguments_of_a_smoke_script_exit_2_with_one_line(script, capsys):
    code, _, err = ran(importlib.import_module(f"scripts.{script}").main, "--nonsense", capsys=capsys)
    assert code == 2 and "--nonsense" in err and len(err.strip().splitlines()) == 1, err
