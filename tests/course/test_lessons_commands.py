"""Course machinery. The commands of `python -m lessons` respond at once, are clear, and never lose student files.

Protects students' files and progress: no command overwrites one, and a mistake on the command line costs one line.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from lessons._course.desk import next_lesson
from lessons._course.doctor import examine
from lessons._course.environment import python_environment
from lessons._course.places import Places
from lessons._course.progress import Entry, Progress
from lessons._course.runner import Command, Spawned
from lessons._course.tracks import Plan, Syllabus, Track
from lessons._course.warm import warm_launch
from tests.course.toy import Toy
from tests.processes import has_ended, wait_for

ROOT = Places.find().root
HEAVY = ("torch", "transformers", "numpy", "pytest", "hypothesis", "mini_engine.checkpoint.config")


def passed(toy: Toy) -> None:
    """Set up the state after a green check."""
    toy.write(1, 2, 3)
    toy.done(1, 2, 3, **dict.fromkeys(("started", "passed", "first_passed"), "2026-01-01"))


def one_line(text: str) -> bool:
    return text.count("\n") == 1 and "Traceback" not in text


def test_the_list_shows_progress_and_what_to_do_next(toy):
    said = toy.run()
    assert "Seats" in said.out and "not started" in said.out
    assert "python -m lessons doctor" in said.out and "python -m lessons start 0" in said.out
    toy.run("start", "0")
    said = toy.run()
    assert "0 of 3 tasks" in said.out and "python -m lessons check 0     task 1: Double a number" in said.out
    passed(toy)
    said = toy.run()
    assert "passed 2026-01-01" in said.out and "python -m lessons start 1" in said.out


def test_a_program_can_read_the_list(toy):
    passed(toy)
    rows = json.loads(toy.run("--json").out)["lessons"]
    assert [(row["number"], bool(row["passed"]), row["tasks_done"]) for row in rows] == [
        (0, True, [1, 2, 3]),
        (1, False, []),
    ]


@pytest.mark.parametrize("arguments", ["[]", "['--help']", "['check', '--help']", "['diff', '0']"])
def test_quick_commands_import_nothing_heavy(toy, arguments):
    toy.write()
    code = (
        "import sys; from lessons._course.cli import main\n"
        f"try: main({arguments})\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    env = os.environ | toy.environment
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, encoding="utf-8")
    assert said.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("passed", "started", "following"),
    [
        ((), (), 0),
        ((0,), (), 1),
        ((5, 8), (), 9),
        ((5,), (), 8),
        ((0, 1, 2, 3), (), 4),
        ((5, 6), (), 8),
        ((5, 6, 8), (), 9),
        ((6, 8), (), 7),
        ((4, 5, 6, 7, 8, 9), (), 0),
        ((0, 1), (4,), 4),
        ((0,), (1, 5), 1),
        ((6,), (2,), 2),
        ((5,), (7, 8), 8),
        (tuple(range(10)), (), None),
    ],
)
def test_the_next_lesson_follows_what_the_student_does(passed, started, following):
    needs = {0: (), 1: (0,), 2: (1,), 3: (2,), 4: (3,), 5: (3, 4), 6: (5,), 7: (6,), 8: (5,), 9: (5,)}
    lessons = [SimpleNamespace(number=number, needs=need) for number, need in needs.items()]
    tracks = (Track("core", "", "", (0, 1, 2, 3, 4, 5, 8)), Track("talk", "", "", (6, 7)), Track("speed", "", "", (9,)))
    syllabus = Syllabus(tracks, (Plan(20, (), then=(9,)),))
    entries = {
        number: Entry(started="x" if number in passed + started else "", passed="x" if number in passed else "")
        for number in needs
    }
    found = next_lesson(lessons, entries, syllabus)
    assert (found and found.number) == following


def test_start_writes_the_starter_and_says_that_red_is_expected(toy):
    said = toy.run("start", "0")
    assert "Written: work/l0/seats.py" in said.out and "Task 2:  Hand out seats" in said.out
    assert "Expect red the first time" in said.out
    assert 'raise NotImplementedError("Lesson 0, task 2: Hand out seats")' in toy.file.path.read_text(encoding="utf-8")


def test_start_never_overwrites(toy):
    toy.run("start", "0")
    toy.file.path.write_text("mine", encoding="utf-8")
    for arguments in (("start", "0"), ("start", "0", "--fresh"), ("start", "0", "--fresh")):
        assert toy.run(*arguments).code == 0
        assert toy.file.path.read_text(encoding="utf-8") == "mine"
    assert {path.name for path in toy.file.path.parent.iterdir()} == {"seats.py", "seats.fresh.py", "seats.fresh-2.py"}
    assert "NotImplementedError" in toy.file.path.with_name("seats.fresh.py").read_text(encoding="utf-8")


def test_two_modules_of_the_same_name_keep_their_folders(toy):
    module = '"mini_engine/kv/seats.py"'
    toy.edit("lessons/l0_toy/lesson.toml", f"[{module}]", f'[{module}, "mini_engine/seats.py"]')
    (toy.places.root / "mini_engine/seats.py").write_text("X = 1\n", encoding="utf-8")
    toy.run("start", "0")
    assert (toy.places.work / "l0/kv/seats.py").exists() and (toy.places.work / "l0/seats.py").exists()


def test_a_module_may_be_in_its_lesson_s_folder_and_in_no_other_lesson_s(toy):
    toml, module = toy.places.root / "lessons/l0_toy/lesson.toml", toy.places.root / "mini_engine/kv/seats.py"
    written = toml.read_text(encoding="utf-8")
    toml.write_text(written.replace("mini_engine/kv", "lessons/l0_toy"), encoding="utf-8")
    module.rename(toml.with_name("seats.py"))
    assert "Written: work/l0/seats.py" in toy.run("start", "0").out
    toml.write_text(written.replace("mini_engine/kv", "lessons/l1_later"), encoding="utf-8")
    assert "lessons/l0_toy/….py" in toy.run("start", "0").err


def test_reset_keeps_every_old_file(toy):
    toy.run("start", "0")
    for text in ("first", "second"):
        toy.file.path.write_text(text, encoding="utf-8")
        assert "Kept:    work/l0/seats.py as seats.old" in toy.run("reset", "0").out
    folder = toy.file.path.parent
    kept = [(folder / name).read_text(encoding="utf-8") for name in ("seats.old.py", "seats.old-2.py")]
    assert kept == ["first", "second"]
    assert "NotImplementedError" in toy.file.path.read_text(encoding="utf-8")


def test_reset_clears_the_progress_but_keeps_the_solution_open(toy):
    passed(toy)
    toy.run("reset", "0")
    entry = Progress(toy.places.work).entry(toy.lesson)
    assert (entry.tasks_done, entry.passed, entry.first_passed) == ([], "", "2026-01-01")
    assert "return 2 * x" in toy.run("solution", "0").out


def test_hints_come_in_three_steps(toy):
    assert toy.run("hint", "0").out.count("Hint") == 1
    assert "Hint 2 of 3: times" in toy.run("hint", "0", "1").out
    third = toy.run("hint", "0").out
    assert "Hint 3 of 3: return 2 * x" in third and "solution 0 1 --give-up" in third
    assert "Hint 1 of 3: look first" in toy.run("hint", "0", "2").out


def test_the_solution_opens_after_passing_or_by_giving_up(toy):
    toy.run("start", "0")
    closed = toy.run("solution", "0")
    assert closed.code == 2 and "2 * x" not in closed.out and one_line(closed.err) and "--give-up" in closed.err
    opened = toy.run("solution", "0", "2", "--give-up")
    assert opened.code == 0 and "taken, self.free = " in opened.out and "2 * x" not in opened.out
    assert "2 * x" in toy.run("solution", "0").out, "a student who gave up once need not repeat --give-up"


def test_diff_hides_the_tasks_that_are_not_done(toy):
    toy.run("start", "0")
    assert "2 * x" not in toy.run("diff", "0").out
    assert "unchanged starter" in toy.run("diff", "0").out, "a starter must not be called equal to the reference"
    toy.edit("work/l0/seats.py", "FIRST = 0", "FIRST = 1")
    said = toy.run("diff", "0").out
    assert "-FIRST = 1" in said and "+FIRST = 0" in said and "2 * x" not in said
    assert "return 2 * x" in toy.run("diff", "0", "--give-up").out


@pytest.mark.parametrize("view", ["--unified", "--side-by-side"])
def test_diff_after_passing_shows_both_sides(toy, view):
    passed(toy)
    assert "work/l0/seats.py: no difference." in toy.run("diff", "0", view).out
    toy.edit("work/l0/seats.py", "return 2 * x", "return x + x")
    said = toy.run("diff", "0", view).out
    assert "return x + x" in said and "return 2 * x" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "7"], "There is no lesson '7'; the lessons are numbered 0 to 1."),
        (["check", "0"], "work/l0/seats.py does not exist; create it with: python -m lessons start 0"),
        (["watch", "0"], "python -m lessons start 0"),
        (["diff", "0"], "python -m lessons start 0"),
        (["hint", "0", "9"], "Lesson 0 has no task 9; its tasks: 1, 2, 3."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(toy, arguments, words):
    said = toy.run(*arguments)
    assert said.code == 2 and one_line(said.err) and words in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "invalid choice: 'nonsense' (choose from "),
        (["check"], "python -m lessons check: the following arguments are required: N"),
        (["check", "0", "--task", "x"], "argument --task: 'x' is not a whole number"),
        (["check", "0", "--task", "0"], "argument --task: 0 is too small; it must be 1 or more"),
        (["check", "0", "--time-limit", "0"], "argument --time-limit: 0 is too short; it must be 1 second or more"),
        (["check", "0", "--time-limit", "nan"], "argument --time-limit: nan is too short"),
        (["check", "0", "--verb"], "unrecognized arguments: --verb"),
        (["diff", "0", "--unified", "--side-by-side"], "not allowed with argument --unified"),
    ],
)
def test_an_invalid_command_line_gives_one_line_that_points_to_help(toy, arguments, words):
    said = toy.run(*arguments)
    assert said.code == 2 and one_line(said.err) and words in said.err and "--help" in said.err


@pytest.mark.parametrize("name", ["0", "l0", "L0", "l0_toy"])
def test_a_lesson_may_be_called_by_number_or_id(toy, name):
    assert toy.run("start", name).code == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('title = "Seats"', "", "the key 'title' is missing"),
        ("minutes = 5", "minutes = ", "lesson.toml: "),
        ('hints = ["a", "b", "c"]', 'hints = ["a"]', "task 3 must have 3 hints, not 1"),
        ("[tasks.3]", "[tasks.5]", "tasks are numbered [1, 2, 5]"),
        ("seats.py::double", "seats.py.double", "write it as file::symbol"),
        ("seats.py::double", "other.py::double", "which is not in modules"),
        ("seats.py::double", "seats.py::Seats.take", "two tasks share a target"),
    ],
)
def test_an_invalid_lesson_file_is_named(toy, old, new, words):
    toy.edit("lessons/l0_toy/lesson.toml", old, new)
    said = toy.run()
    assert said.code == 2 and one_line(said.err) and words in said.err and "lesson.toml" in said.err


def test_progress_keeps_unknown_entries(toy):
    toy.places.work.mkdir()
    known = {"tasks_done": [1], "colour": "red", "hints": "not a table"}
    raw = {"version": 9, "later": 1, "lessons": {"l9_gone": {"passed": "2025-01-01"}, "l0_toy": known}}
    (toy.places.work / "progress.json").write_text(json.dumps(raw), encoding="utf-8")
    assert toy.run("hint", "0", "1").code == 0
    after = json.loads((toy.places.work / "progress.json").read_text(encoding="utf-8"))
    assert after["later"] == 1 and after["lessons"]["l9_gone"] == {"passed": "2025-01-01"}
    assert after["lessons"]["l0_toy"]["colour"] == "red"
    assert after["lessons"]["l0_toy"]["tasks_done"] == [1] and after["lessons"]["l0_toy"]["hints"] == {"1": 1}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"lessons": []}', "\x00", '{"lessons": {"l0_toy": 5}}'])
def test_an_unreadable_progress_file_is_kept_and_stops_no_command(toy, text):
    toy.places.work.mkdir()
    (toy.places.work / "progress.json").write_text(text, encoding="utf-8")
    assert toy.run().code == 0 and toy.run("start", "0").code == 0
    kept = [path.read_text(encoding="utf-8") for path in toy.places.work.glob("progress.broken*.json")]
    assert kept == ([] if "l0_toy" in text else [text])


def test_a_check_that_ends_keeps_what_other_commands_have_saved_in_the_meantime(toy):
    check = Progress(toy.places.work)
    entry = check.entry(toy.lesson)
    other = replace(toy.lesson, id="l7_other")
    meantime = Progress(toy.places.work)
    meantime.save(other, Entry(tasks_done=[1], passed="2026-01-01"))
    meantime.save(toy.lesson, Entry(hints={"1": 2}, gave_up=True))
    entry.tasks_done = [1]
    check.save(toy.lesson, entry)
    now = Progress(toy.places.work)
    assert now.entry(other).passed == "2026-01-01", "the other lesson was passed while the check ran"
    assert now.entry(toy.lesson) == Entry(tasks_done=[1], hints={"1": 2}, gave_up=True), (
        "hints were taken while the check ran, and only tasks_done is the check's to change"
    )


def test_a_save_over_a_lost_or_damaged_file_writes_all_that_was_read(toy):
    for spoil in (lambda path: path.unlink(), lambda path: path.write_text("{", encoding="utf-8")):
        passed(toy)
        progress = Progress(toy.places.work)
        entry = progress.entry(toy.lesson)
        spoil(progress.path)
        entry.hints["1"] = 1
        progress.save(toy.lesson, entry)
        now = Progress(toy.places.work).entry(toy.lesson)
        assert (now.tasks_done, now.hints) == ([1, 2, 3], {"1": 1})


def test_tasks_that_no_longer_exist_are_not_counted(toy):
    toy.run("start", "0")
    toy.done(1, 8, 9)
    assert "1 of 3 tasks" in toy.run().out


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")
def test_watch_checks_again_at_each_save_and_stops_quietly(toy):
    toy.run("start", "0")
    log = toy.places.root / "watch.log"
    with log.open("w", encoding="utf-8") as out:
        watch = subprocess.Popen(
            [sys.executable, "-u", "-m", "lessons", "watch", "0"],
            cwd=ROOT, env=os.environ | toy.environment, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip

    def said(words: str, times: int = 1) -> None:
        wait_for(f"{words!r} in {log}", lambda: log.read_text(encoding="utf-8").count(words) >= times)

    try:
        for tasks, words in (((), "Task 1 is not written"), ((1,), "Next: task 2"), ((1, 2, 3), "Lesson 0 passes")):
            if tasks:
                toy.write(*tasks)
            said(words)
            said("Waiting for changes", times=len(tasks) + 1 if len(tasks) < 2 else 3)
    finally:
        os.killpg(watch.pid, signal.SIGINT)
    assert watch.wait(30) == 0
    assert "Stopped." in log.read_text(encoding="utf-8") and "Traceback" not in log.read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")
def test_ctrl_c_in_a_check_leaves_no_process_and_no_traceback(toy):
    seen = toy.places.root / "pid"
    line = f"        import os, time; open({str(seen)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    toy.write_wrong("        return taken", line)
    check = subprocess.Popen(
        [sys.executable, "-m", "lessons", "check", "0"],
        cwd=ROOT, env=os.environ | toy.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        start_new_session=True,
    )  # fmt: skip
    while check.poll() is None and not (seen.exists() and seen.read_text(encoding="utf-8")):
        time.sleep(0.05)
    os.killpg(check.pid, signal.SIGINT)
    out, err = check.communicate(timeout=30)
    assert check.returncode == 130 and "Traceback" not in out + err
    wait_for("the process is gone", lambda: has_ended(int(seen.read_text(encoding="utf-8"))))


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux are processes forked")
@pytest.mark.parametrize("launch", [Spawned, warm_launch()], ids=["spawned", "forked"])
def test_ctrl_c_while_a_process_starts_leaves_none(launch, toy, tmp_path, monkeypatch):
    pids = []

    def pressing(start):
        def press(*args, **options):
            started = start(*args, **options) or args[0]
            pids.append(started.pid)
            signal.raise_signal(signal.SIGINT)
            return started

        return press

    monkeypatch.setattr(subprocess, "Popen", pressing(subprocess.Popen))
    monkeypatch.setattr(ForkServerProcess, "start", pressing(ForkServerProcess.start))
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(40); open('woke', 'w')", encoding="utf-8")
    command = Command([str(script)], python_environment(toy.places), tmp_path, tmp_path / "out", tmp_path / "err")
    with pytest.raises(KeyboardInterrupt):
        launch(command)
    monkeypatch.undo()  # `has_ended` starts ps
    wait_for("the process is gone", lambda: has_ended(pids[0]))
    assert not (tmp_path / "woke").exists(), "it was waited for instead of killed"


def test_missing_packages_are_reported_in_one_line():
    code = "import sys; sys.modules['rich'] = None; import runpy; runpy.run_module('lessons', run_name='__main__')"
    said = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert said.returncode == 1 and one_line(said.stderr) and "not installed" in said.stderr


def test_doctor_ends_with_text_that_the_model_generated(toy):
    with patch.dict(os.environ, {"KV_COURSE_ROOT": str(ROOT), "KV_COURSE_WORK": str(toy.places.work)}):
        found = list(examine(Places.find()))
    assert found[-1].name == "pocket model" and "The capital of France is Paris" in found[-1].text
    assert {finding.name for finding in found} >= {"Python", "torch", "pytest", "GPU", "C++ compiler", "your files"}
    assert not [finding for finding in found if finding.state == "missing"]


def test_doctor_says_why_the_model_does_not_run(toy):
    said = toy.run("doctor")  # the toy course has no model
    assert said.code == 1 and "pocket model   missing  does not run: ModuleNotFoundError" in said.out
