"""Course machinery. The run of all smoke scripts: what it shows, what it counts, and when it fails."""

import json
import subprocess
import sys
from pathlib import Path

from scripts import ROOT, smoke_all

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from tests.course.threads import wait_policy

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
kv = dict(layout="[slots, heads, dim]", bytes=1048576, bytes_per_token=256)
print(json.dumps(dict(lesson=number, model="m", dtype="float32", device="cpu", match=request["match"],
                      requests=[request, request], kv=kv, seconds=dict(load=1.0, ours=0.5, hf=2.0))))
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
    return tmp_path


def run(capfd, *arguments: str) -> tuple[int, str, str]:
    code = smoke_all.main(arguments)
    return code, *capfd.readouterr()


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


def test_a_crashing_script_is_shown_with_its_own_output(course, capfd):
    code, out, _ = run(capfd, "--", "--broken")
    assert code == 1
    assert out.count("the checkpoint is gone") == 2 and "2 of 2 lessons failed: 1, 10." in out


def test_a_script_that_hangs_is_killed(course, capfd):
    (course / "smoke.py").write_text("import time; time.sleep(600)", encoding="utf-8")
    code, out, _ = run(capfd, "--only", "1", "--timeout", "0.2")
    assert code == 1 and "still running after" in out


def test_json_is_one_object_and_nothing_else(course, capfd):
    code, out, _ = run(capfd, "--json", "--only", "1")
    report = json.loads(out)
    assert code == 0 and report["match"] is True
    [lesson] = report["lessons"]
    assert (lesson["number"], lesson["equal_tokens"], lesson["tokens"]) == (1, 8, 8)
    assert lesson["tokens_per_second"] == {"ours": 16.0, "hf": 4.0}


@pytest.mark.parametrize("only", ["3", "x"])
def test_a_lesson_that_is_not_there_is_refused_in_one_line(course, capfd, only):
    code, out, err = run(capfd, "--only", only)
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and repr(only) in err


def test_every_lesson_of_the_course_has_a_smoke_script():
    places = Places.find()
    for lesson in read_lessons(places):
        assert lesson.smoke, f"{places.shown(lesson.folder)}/lesson.toml names no smoke script"
        assert (places.root / lesson.smoke[0]).exists(), f"{lesson.smoke[0]} is not there"


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "scripts").glob("l*_smoke.py")))
def test_threads_are_told_to_sleep_before_torch_is_loaded(script):
    """OpenMP reads OMP_WAIT_POLICY once, when torch loads it; scripts.smoke has to be imported before that."""
    assert wait_policy(f"from scripts import {script}; import torch") == "PASSIVE"


def test_help_needs_no_torch():
    program = "try: smoke_all.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom scripts import smoke_all\n{program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0 and "--only" in done.stdout, done.stderr
