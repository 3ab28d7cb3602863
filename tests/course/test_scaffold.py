"""Course machinery. The repository as a whole: versions agree, names do not drift, nothing is tied to one machine.

Protects installations on another day, another Python or another system, and the rules of CONTRIBUTING.md.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts import setup_env

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {".git", ".venv", ".cache", "work", "build", "dist", "node_modules", "__pycache__", "vendor"}
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".html", ".css", ".js", ".svg", ".json", ".jinja", ".txt", ""}
PIN = re.compile(r"\b([A-Za-z][A-Za-z0-9-]*)(?:\[[a-z,]+\])?==(\d[\w.]*)")
OPENS = {"open", "read_text", "write_text"}


def walk(folder: Path) -> Iterator[Path]:
    """Return the repository's own files, without caches, the environment and the student's files."""
    for path in sorted(folder.iterdir()):
        if path.name in NOT_OURS or path.name.startswith((".pytest", ".ruff", ".hypothesis")):
            continue
        if path.is_dir():
            yield from walk(path)
        else:
            yield path


FILES = list(walk(ROOT))
PYTHON = [path for path in FILES if path.suffix == ".py"]
SOURCES = [path for path in PYTHON if not path.is_relative_to(ROOT / "tests")]
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in FILES
    if path.suffix in TEXT and "mini_engine/pocket" not in path.as_posix()
}
SETTINGS = tomllib.loads(TEXTS["pyproject.toml"])


def all_requirements() -> list[str]:
    """Return every requirement in pyproject.toml, from all of its tables."""
    project = SETTINGS["project"]
    groups = [*project["optional-dependencies"].values(), *SETTINGS["dependency-groups"].values()]
    named = [entry for group in groups for entry in group if isinstance(entry, str)]
    return [*project["dependencies"], *named, *SETTINGS["build-system"]["requires"]]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# Versions


def test_every_requirement_is_pinned_but_torch():
    loose = [text for text in all_requirements() if not PIN.match(text)]
    assert [text.split(">")[0] for text in loose] == ["torch"], (
        "pin a version that CI has run; torch's pin is in setup_env"
    )


def test_a_pin_says_the_same_version_wherever_it_is_written():
    pins = dict(PIN.match(text).groups() for text in all_requirements() if PIN.match(text))
    pins["torch"] = setup_env.TORCH
    for name, text in TEXTS.items():
        for package, version in PIN.findall(text):
            if package in pins and name != "tests/course/test_scaffold.py":
                assert version == pins[package], f"{name} says {package}=={version}, the pin is {pins[package]}"


def test_torch_s_pin_lies_in_pyproject_s_range():
    requirement = next(text for text in SETTINGS["project"]["dependencies"] if text.startswith("torch"))
    low, high = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", requirement).groups()
    numbers = [[int(part) for part in text.split(".")] for text in (low, setup_env.TORCH, high)]
    assert numbers[0] <= numbers[1] < numbers[2], (
        f"pip would replace torch {setup_env.TORCH} by another: it is outside {requirement}"
    )


def locked_versions(python: int, system: str) -> dict[str, str]:
    """What scripts/constraints.txt says on one of the course's Pythons and systems; no package twice."""
    here = {"python_full_version": f"3.{python}.0", "python_version": f"3.{python}", "sys_platform": system}
    found = [Requirement(line) for line in TEXTS["scripts/constraints.txt"].splitlines() if not line.startswith("#")]
    said = [
        line for line in found if line.marker is None or line.marker.evaluate(here | {"platform_machine": "x86_64"})
    ]
    versions = {canonicalize_name(line.name): str(line.specifier).removeprefix("==") for line in said}
    assert len(versions) == len(said), "two lines for one package hold at once"
    return versions


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
@pytest.mark.parametrize("python", range(setup_env.OLDEST[1], setup_env.NEWEST[1] + 1))
def test_every_pin_is_locked_as_it_is_pinned(python: int, system: str):
    versions = locked_versions(python, system)
    assert versions["torch"] == setup_env.TORCH, "run `make lock`: torch's pin was moved"
    for text in all_requirements():
        wanted = Requirement(text)
        if wanted.name == "torch" or (wanted.marker and not wanted.marker.evaluate({"sys_platform": system})):
            continue
        locked = versions.get(canonicalize_name(wanted.name))
        assert f"=={locked}" == str(wanted.specifier), f"run `make lock`: {text} is pinned, {locked} is locked"


def test_the_pythons_agree():
    oldest, newest = setup_env.OLDEST, setup_env.NEWEST
    assert SETTINGS["project"]["requires-python"] == f">=3.{oldest[1]},<3.{newest[1] + 1}"
    assert SETTINGS["tool"]["ruff"]["target-version"] == f"py3{oldest[1]}"
    matrix = re.search(r"python: \[(.*)\]", TEXTS[".github/workflows/tests.yml"]).group(1)
    assert matrix == f'"3.{oldest[1]}", "3.{newest[1]}"', "CI runs the oldest and the newest Python"
    assert f"3.{oldest[1]} to 3.{newest[1]}" in TEXTS["README.md"]


# Folders


def test_make_and_ci_name_scripts_that_exist():
    workflows = (".github/workflows/tests.yml", ".github/workflows/site.yml")
    for name in ("Makefile", ".ci/run", *workflows, "README.md", "CONTRIBUTING.md", "mkdocs.yml"):
        for script in re.findall(r"scripts/[\w/]+\.py|-m scripts\.[\w.]+", TEXTS[name]):
            path = script.removeprefix("-m ").removesuffix(".py").replace(".", "/") + ".py"
            assert (ROOT / path).exists(), f"{name} names {script}, which is not there"
    commands = TEXTS["README.md"] + TEXTS["CONTRIBUTING.md"] + TEXTS[".ci/run"]
    called = set(re.findall(r"(?:^|`|\" )make (\w[\w-]*)", commands, flags=re.MULTILINE))
    targets = set(re.findall(r"^([\w-]+):", TEXTS["Makefile"], flags=re.MULTILINE))
    assert called <= targets, f"no such target in the Makefile: {called - targets}"


# Words


def test_a_module_says_which_lesson_it_belongs_to():
    wrong = {}
    for path in SOURCES:
        tree = tree_of(path)
        first = (ast.get_docstring(tree) or "").split("\n")[0]
        if tree.body and not re.match(r"(Lesson \d+|Course machinery)\. \S", first):
            wrong[shown(path)] = first
    assert not wrong, "begin a module's docstring with 'Lesson N. …' or 'Course machinery. …'"


def test_nothing_is_tied_to_one_machine():
    folders = [
        "/".join(["", *parts]) for parts in (("work", "main"), ("work", "shared"), ("tmp", "v"), ("opt", "wheels"))
    ]
    pattern = re.compile("|".join(rf"{re.escape(folder)}\b" for folder in [*folders, "/root/", "/home/"]))
    for name, text in TEXTS.items():
        found = pattern.search(text)
        assert not found or name == "tests/course/test_scaffold.py", (
            f"{name} names {found.group()!r}, a path of one machine"
        )


def test_names_are_spelled_one_way():
    wrong = re.compile("|".join(["(?<!To)KV" + "Pool", "Kv" + "pool", r"\bReq\b(?=[(:\]])"]))
    for name, text in TEXTS.items():
        found = wrong.search(text)
        theirs = {"tests/course/test_scaffold.py", "lessons/coming-from.md", "lessons/sources.md"}
        assert not found or name in theirs, (
            f"{name} says {found.group()!r}; say KvPool, Request (TokenToKV… is SGLang's name)"
        )


# Code


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))


def opens_text(call: ast.Call) -> bool:
    """Whether a call opens, reads or writes a file as text: open(...), path.open(...), path.read_text(...) ..."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in OPENS:
        return False
    if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") in {"os", "webbrowser", "tarfile"}:
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    modes = [
        node.value for node in given if isinstance(node, ast.Constant) and re.fullmatch(r"[rwaxbt+]+", str(node.value))
    ]
    return not any("b" in mode for mode in modes)


def test_text_is_read_and_written_as_utf_8():
    wrong = []
    for path in PYTHON:
        for call in calls(path):
            keywords = {keyword.arg for keyword in call.keywords}
            if any(getattr(argument, "value", None) == "utf-8" for argument in call.args):
                continue  # given by place: path.read_text("utf-8")
            runs = getattr(call.func, "attr", "") in {"run", "Popen", "check_output"}
            is_text = opens_text(call) or (runs and keywords & {"text", "universal_newlines"})
            if is_text and "encoding" not in keywords:
                wrong.append(f"{shown(path)}:{call.lineno}")
    assert not wrong, "without encoding='utf-8', Windows reads and writes text in another encoding"


def test_functions_fit_on_a_screen():
    long = {}
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node, clean=False)
                lines = node.end_lineno - node.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
                if lines > 40:
                    long[f"{shown(path)}::{node.name}"] = lines
    assert not long, "split these into functions of at most 40 lines, preferably 25"
