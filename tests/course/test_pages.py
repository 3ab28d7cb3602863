"""Course machinery. The pages are correct: links work, commands run, code is the engine's, sections are in order.

Protects readers from a dead link, a command that fails and a solved task, and students from a pitfall without a test.
"""

import argparse
import re
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.cli import make_parser
from lessons._course.environment import python_environment
from lessons._course.output import last_lines
from lessons._course.pages import Page, find_pages, slug
from lessons._course.places import WORK_VARIABLE, Places
from lessons._course.quoted import INSTALLS, RUNNABLE, Quoted, quoted_commands
from lessons._course.runner import Command, Spawned, run_until
from lessons._course.warm import warm_launch

PLACES = Places.find()
ROOT = PLACES.root
read = cache(Page.read)
PAGES = {path.relative_to(ROOT).as_posix(): read(path) for path in find_pages(ROOT)}
SCRIPTS = [path.read_text(encoding="utf-8") for path in (ROOT / "scripts").rglob("*.py")]
LESSONS = [lesson for lesson in read_lessons(PLACES) if lesson.page.exists()]
COUNTS = ("", "one", "two", "three", "four")
SECTIONS = [
    "The pain", "Guess first", "The idea", "Shapes", "What changes, what must not", "Your tasks", "What must hold",
    "Checkpoint", "What it bought", "Pitfalls", "Questions", "In vLLM and SGLang", "Next",
]  # fmt: skip
COMMANDS = [command for page in PAGES.values() for command in quoted_commands(page)]
PATIENCE = 600.0
AT_ONCE = 2
each_page = pytest.mark.parametrize("name", PAGES)
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.id)


def place(command: Quoted) -> str:
    return f"{command.page.relative_to(ROOT).as_posix()}:{command.line}"


@each_page
def test_links_and_anchors_hold(name):
    page = PAGES[name]
    dead = [f"{name}:{link.line}: {link.target}" for link in page.links if not holds(page, link.target)]
    assert not dead, "these point nowhere:\n" + "\n".join(dead)


def holds(page: Page, target: str) -> bool:
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return True
    file, _, anchor = target.partition("#")
    path = (page.path.parent / file).resolve() if file else page.path
    if not path.exists() or not path.is_relative_to(ROOT):
        return False
    readme = path / "README.md" if path.is_dir() else path
    return not anchor or (readme.suffix == ".md" and anchor in read(readme).anchors)


def test_every_test_that_the_security_page_names_is_there():
    """A promise rests on its tests; one that was renamed or deleted must not go on being named."""
    named = set(re.findall(r"`(test_\w+)`", "\n".join(PAGES["SECURITY.md"].lines)))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for source in sources for name in re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE)}
    assert len(named) > 20 and named <= there, f"SECURITY.md names tests that do not exist: {sorted(named - there)}"


@each_lesson
def test_a_lessons_page_has_its_sections_in_order(lesson):
    found = [heading.text for heading in read(lesson.page).headings if heading.level == 2]
    assert [re.sub("<[^>]*>", "", title).partition(": ")[0] for title in found] == SECTIONS


@each_lesson
def test_a_lessons_page_names_each_task_and_where_it_is(lesson):
    section = plain(read(lesson.page).section("Your tasks"))
    for task in lesson.tasks:
        for target in task.targets:
            name = plain(target.symbol.rpartition(".")[2])
            assert re.search(rf"(?<!\d){task.number}\b[^\n]*{re.escape(name)}", section), (
                f"task {task.number}, {target.symbol}, has no line of its own in 'Your tasks'"
            )


@each_lesson
def test_a_lessons_page_tells_its_time_its_stops_and_what_is_beyond_the_core(lesson):
    """As in lesson.toml; no sitting is longer than an hour and a half."""
    page = read(lesson.page)
    head = next(line for _, line in page.prose[1:] if line.strip())
    told = re.match(r"(\d+) minutes(?:, in (\w+) sittings)? · needs (.*?) · ", head)
    assert told, f"the first line is {head!r}; begin with '45 minutes · needs … · '"
    assert int(told[1]) == lesson.minutes and (told[2] or "one") == COUNTS[len(lesson.sittings)]
    assert tuple(map(int, re.findall(r"\[lesson (\d+)\]", told[3]))) == lesson.needs
    assert max(sitting.minutes for sitting in lesson.sittings) <= 90
    section = page.section("Your tasks")
    more = {int(number) for number in re.findall(r"^\| (\d+)[^|]*\(more\)", section, re.MULTILINE)}
    stops = [int(number) for number in re.findall(r"Stop after task (\d+)", section)]
    assert more == {task.number for task in lesson.tasks} - lesson.core
    assert stops == [sitting.last_task for sitting in lesson.sittings[:-1]]


@each_lesson
def test_a_lessons_page_prints_no_tasks_body(lesson):
    shown = {block.comment.removeprefix("code: ") for block in read(lesson.page).blocks}
    targets = {f"{target.file}::{target.symbol}" for task in lesson.tasks for target in task.targets}
    assert not shown & targets, "the page solves this task; say what it must do instead"


@each_lesson
def test_a_lessons_page_names_the_pitfall_and_the_test_of_each_bug(lesson):
    section = plain(read(lesson.page).section("Pitfalls"))
    for bug in lesson.bugs:
        assert plain(bug.pitfall) in section, f"'Pitfalls' does not name {bug.pitfall!r}"
        names = {test.rpartition("::")[2] for test in bug.tests}
        assert any(name in section for name in names), f"'Pitfalls' names no test of {bug.pitfall!r}: {names}"


@each_lesson
def test_every_file_that_a_lessons_page_lists_is_there(lesson):
    """In a table of files a name without a folder is in the one before it, or in the lesson's own."""
    text = lesson.page.read_text(encoding="utf-8")
    for table in re.findall(r"^\| files? \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        for row in table.splitlines():
            folder = ""
            for name in re.findall(r"`([\w/]+\.(?:py|h|cpp))`", row.split("|")[1]):
                folder = name.rpartition("/")[0] or folder
                path = f"{folder}/{name.rpartition('/')[2]}"
                there = [*(ROOT / "mini_engine").rglob("*.*"), *lesson.folder.glob("*.py")]
                assert any(found.match(path) for found in there), f"{path} is not there"


def plain(text: str) -> str:
    return re.sub(r"[`*\\]", "", text).lower()


each_command = pytest.mark.parametrize("command", COMMANDS, ids=place)


class Understood(Exception):
    """A command line has been parsed."""


@each_command
def test_every_quoted_command_is_understood(command, monkeypatch):
    """Its script, module or test exists, and its parser accepts the options; also of what is too long to run."""
    assert not command.complaint, f"{place(command)}: {command.text}: {command.complaint}"
    if not RUNNABLE.match(command.text) or INSTALLS in command.text:
        pytest.skip(f"no command of the course: {command.text}")
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    if command.arguments[0] == "-c":
        compile(command.arguments[1], place(command), "exec")
    elif command.arguments[:2] == ["-m", "pytest"]:
        named = [word for word in command.arguments[2:] if word.startswith("tests/")]
        assert all((ROOT / word.partition("::")[0]).exists() for word in named)
    else:
        main, options = main_of(command)
        with pytest.raises(Understood):
            main(options)


def main_of(command: Quoted) -> tuple[Callable[[list[str]], int], list[str]]:
    """Return what a command runs, and the options that it gets."""
    first, *rest = command.arguments
    if first != "-m":
        name = first.removesuffix(".py").replace("/", ".")
    else:
        name, *rest = rest
    name = {"lessons": "lessons._course.cli", "mini_engine": "mini_engine.__main__"}.get(name, name)
    return import_module("scripts.bench.command" if name == "scripts.bench" else name).main, rest


@pytest.mark.nightly
@each_command
def test_every_quoted_command_runs(command, ran):
    if command.why_not:
        pytest.skip(f"not run: {command.why_not}")
    code, output = ran(command)
    assert code in command.allowed, f"{place(command)}: {command.text}\nended with exit code {code}:\n{output}"


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory):
    """Runs the selected tests' commands, page by page, each page with a fresh `work/`, and each command once."""
    chosen = [item.callspec.params["command"] for item in request.session.items if item.originalname == RUNS]
    done: dict[str, tuple[int | None, str]] = {}
    folder, launch = tmp_path_factory.mktemp("pages"), warm_launch()

    def run_page(path: Path) -> None:
        work = folder / slug(path.relative_to(ROOT).as_posix())
        for command in chosen:
            if command.page == path and not command.why_not and not command.complaint and command.text not in done:
                done[command.text] = None, "never run"
                done[command.text] = run(command, work, launch)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {path: pool.submit(run_page, path) for path in dict.fromkeys(command.page for command in chosen)}

        def result(command: Quoted) -> tuple[int | None, str]:
            for future in futures.values():
                future.result()
            return done[command.text]

        yield result


RUNS = "test_every_quoted_command_runs"


def run(command: Quoted, work: Path, launch) -> tuple[int | None, str]:
    """Run one command from the root with `work` as the student's folder. Return its exit code and last output."""
    work.mkdir(parents=True, exist_ok=True)
    out, err = work / "out", work / "err"
    env = python_environment(PLACES) | {WORK_VARIABLE: str(work)}
    start = Spawned if command.arguments[0] == "-c" else launch
    job = start(Command(command.arguments, env, ROOT, out, err))
    return run_until(job, time.monotonic() + PATIENCE, lambda: None), last_lines(out, err, count=20)


@each_page
def test_commands_in_running_text_exist(name):
    """Inline code is not run, but the commands, options and scripts that it names must exist."""
    for line, text in PAGES[name].inline_code:
        if text.startswith("python -m lessons "):
            assert_parses(text, f"{name}:{line}")
        elif match := re.match(r"python (?:-m )?(scripts[/.][\w/.]+)", text):
            script = match[1].removesuffix(".py").replace(".", "/") + ".py"
            assert (ROOT / script).exists(), f"{name}:{line}: there is no {script}"
            for option in re.findall(r"--[a-z][a-z-]*", text):
                assert any(option in source for source in SCRIPTS), f"{name}:{line}: no script knows {option}"


def assert_parses(text: str, where: str) -> None:
    """Let the command line parse it, with a number where the page writes a letter, or nothing."""
    words = [re.sub(r"^(N|K|TASK|\[TASK\]|…)$", "1", word) for word in shlex.split(text)[3:]]
    assert any(is_read(line) for line in (words, [*words, "1"])), (
        f"{where}: `{text}` is not a valid command line of the course"
    )


def is_read(words: list[str]) -> bool:
    try:
        make_parser().parse_args(words)
    except SystemExit as leave:
        return leave.code == 0  # --help
    return True


def test_slugs_are_githubs():
    for heading, expected in {
        "What changes, what must not": "what-changes-what-must-not",
        "`KvPool.set_kv` and [a link](x.md)": "kvpoolset_kv-and-a-link",
        "In vLLM and SGLang": "in-vllm-and-sglang",
        "Ünïcode – and   spaces": "ünïcode--and---spaces",
        "1. One **bold** word!": "1-one-bold-word",
    }.items():
        assert slug(heading) == expected
