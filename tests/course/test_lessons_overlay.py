"""Course machinery. The student's file replaces the reference in a process and in every process that it starts.

Without it, a check could test the reference and turn green for a student who has written nothing.
"""

import json
import os
import subprocess
import sys

import pytest

from lessons._course.places import CHILD
from tests.course.toy import Toy

MINE = "def double(x):\n    return 'mine'\n"
ASK = "import mini_engine.kv.seats as seats; print(seats.double(2), seats.__file__)"


@pytest.fixture
def toy(tmp_path) -> Toy:
    toy = Toy(tmp_path)
    toy.write()
    toy.file.path.write_text(MINE, encoding="utf-8")
    return toy


def python(toy: Toy, *arguments: str, overlay: dict | None = None, blocked: dict | None = None):
    env = {
        "PYTHONPATH": os.pathsep.join([str(CHILD), str(toy.places.root)]),
        "KV_COURSE_OVERLAY": json.dumps({toy.file.import_name: str(toy.file.path)} if overlay is None else overlay),
        "KV_COURSE_BLOCKED": json.dumps(blocked or {}),
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=os.environ | env, cwd=toy.places.root, capture_output=True, encoding="utf-8")


def test_the_students_file_is_imported_under_the_references_name(toy):
    assert python(toy, "-c", ASK).stdout.split() == ["mine", str(toy.file.path)]


def test_without_an_overlay_the_reference_is_imported(toy):
    assert python(toy, "-c", ASK, overlay={}).stdout.startswith("4 ")


def test_child_processes_import_it_too(toy):
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASK!r}], check=True)"
    assert python(toy, "-c", inner).stdout.startswith("mine ")


def test_a_traceback_shows_the_students_path_and_line(toy):
    toy.file.path.write_text("def double(x):\n    return x / 0  # here\n", encoding="utf-8")
    said = python(toy, "-c", ASK).stderr
    assert f'File "{toy.file.path}", line 2, in double' in said and "return x / 0  # here" in said


def test_a_save_within_the_same_second_is_noticed(toy):
    for answer in ("aaaa", "bbbb", "cccc"):
        toy.file.path.write_text(MINE.replace("mine", answer), encoding="utf-8")
        os.utime(toy.file.path, (1_000_000_000, 1_000_000_000))
        assert python(toy, "-c", ASK).stdout.startswith(answer)
    assert not (toy.file.path.parent / "__pycache__").exists(), "a cached compilation may be one save behind"


def test_relative_imports_in_the_students_file_reach_the_engine(toy):
    toy.file.path.write_text("from . import later\n\n\ndef double(x):\n    return later.__name__\n", encoding="utf-8")
    assert python(toy, "-c", ASK).stdout.startswith("mini_engine.kv.later ")


def test_importing_a_blocked_module_fails_with_the_reason(toy):
    said = python(toy, "-c", "import mini_engine.kv.later", blocked={"mini_engine.kv.later": "it is lesson 1's"})
    assert "mini_engine.kv.later cannot be imported here: it is lesson 1's" in said.stderr


def test_the_installations_own_sitecustomize_still_runs(toy, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('the other one')\n", encoding="utf-8")
    paths = os.pathsep.join([str(CHILD), str(other), str(toy.places.root)])
    env = os.environ | {"PYTHONPATH": paths, "KV_COURSE_OVERLAY": "{}"}
    said = subprocess.run([sys.executable, "-c", "pass"], env=env, capture_output=True, encoding="utf-8")
    assert said.stdout == "the other one\n"
