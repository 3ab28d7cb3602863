"""Course machinery. Answers a page's calls, JSON in and JSON out: a lab's frames, a check of tasks, slots."""

import ast
import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.live import deadline

from mini_engine.base.errors import UserError

TEST_SECONDS = 10.0
LAB_SECONDS = 5.0
MINE = Path("work/lab")
# The characters that hypothesis' texts are made of, and those that do not come back. It would encode each of a million.
UTF_8 = [[[0, 0xD7FF], [0xE000, sys.maxunicode]], []]


def answer(root: str, kind: str, question: str, tell: Callable[[str], None] = lambda text: None) -> str:
    """Answer one question of a page. tell: called with progress, as a heartbeat."""
    asked = json.loads(question)
    work = {"lab": lab, "check": check, "prepare": prepare, "pocket": pocket}[kind]
    return json.dumps(work(Path(root), asked, tell))


def prepare(root: Path, asked: dict[str, Any], tell) -> dict[str, Any]:
    """Do slow work ahead of time, so that the first check does not wait for it."""
    import hypothesis.stateful  # noqa: F401
    import pytest  # noqa: F401
    from hypothesis.internal import charmap

    table = charmap.charmap_file("codec-v2-utf-8")
    table.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(table, "wt", encoding="utf-8") as file:
        json.dump(UTF_8, file)
    charmap.charmap()
    return {"ready": True}


def lab(root: Path, asked: dict[str, Any], tell) -> dict[str, Any]:
    """Play a scenario. asked: lab, settings, do or seed, and `mine`, the reader's own modules by path.

    Returns:
        the trace as `tape` writes it, with its settings and events and the frame in which most blocks are held; or
        `error`, a sentence; or `stopped`, the reason the reader's own code cannot be run.
    """
    own = {}
    if not asked.get("mine"):
        return play(asked)
    for module, source in asked["mine"].items():
        path = root / MINE / Path(module).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8", newline="\n")
        own[module.removesuffix(".py").replace("/", ".")] = str(path)
    env = {"KV_COURSE_OVERLAY": json.dumps(own), "KV_COURSE_TEST_SECONDS": str(LAB_SECONDS)}
    from scripts.live.judging import Command, environment

    command = Command([], env, root, Path(os.devnull), Path(os.devnull))
    with environment(command, ("mini_engine", "scripts.live.labs", "scripts.traces")):
        try:
            return play(asked)
        except Exception as error:
            return {"stopped": told(error)}


def told(error: Exception) -> str:
    """Return an error and its line in the reader's own code, in a sentence."""
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or '').name}:{error.lineno}: SyntaxError: {error.msg}."
    return f"{type(error).__name__}: {str(error).rstrip('.')}, from {place(error)}."


def play(asked: dict[str, Any]) -> dict[str, Any]:
    from scripts.live.labs import LABS
    from scripts.live.labs.events import whole_number

    chosen = LABS[asked["lab"]]
    settings, do = asked.get("settings", {}), asked.get("do", "")
    try:
        if asked.get("seed"):
            settings, do = chosen.scenario(whole_number(str(asked["seed"]), 0, 9999, "the seed"))
        with deadline.Deadline(LAB_SECONDS, lambda stack: None):
            played = chosen.play(settings, do)
    except Exception as error:
        if type(error).__name__ != UserError.__name__:
            raise
        return {"error": f"{error}."}
    except deadline.TookTooLong as error:
        return {"error": f"The code did not finish within {LAB_SECONDS:g} s; {place(error)} runs on and on."}
    more = {"alive": played.alive, "fullest": played.fullest}
    return {"trace": played.trace, "settings": played.chosen, "do": do, **more}


def pocket(root: Path, asked: dict[str, Any], tell) -> dict[str, Any]:
    """Return the slots of a text that the pocket model continues, and the pool's trace. asked: `texts`."""
    from scripts.live.answers import fed

    try:
        return fed(asked["texts"])
    except UserError as error:
        return {"error": f"{error}."}


def place(error: BaseException) -> str:
    """Return the line that ran when the time was up."""
    last = error.__traceback__
    while last and last.tb_next and last.tb_next.tb_frame.f_code.co_filename != deadline.__file__:
        last = last.tb_next
    return f"{Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}" if last else "it"


def misread(expression: str) -> str:
    """Return why Python cannot read an expression, in a sentence; nothing if it can."""
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError as error:
        return f"Python cannot read your expression: {error.msg}."
    return ""


def check(root: Path, asked: dict[str, Any], tell) -> list[dict[str, Any]]:
    """Judge the tasks in order, up to the first that is not done.

    asked: lesson (its id), tasks, and either `source`, the module, or `expression`, what a task's function returns;
    `seconds` for a test, if a machine needs more than TEST_SECONDS.
    """
    from scripts.live.judging import as_data, verdict, with_line

    if "expression" in asked and (problem := misread(asked["expression"])):
        return [{"result": {"status": "error"}, "advice": {"headline": problem, "lines": []}}]
    found, seconds = [], asked.get("seconds", TEST_SECONDS)
    for number in asked["tasks"]:
        tell(f"task {number}")
        if "expression" in asked:
            source = with_line(root, asked["lesson"], number, f"return {asked['expression']}")
        else:
            source = asked["source"]
        judged = verdict(root, asked["lesson"], number, source, seconds, lambda event: tell(event["event"]))
        found.append(as_data(judged))
        if found[-1]["result"]["status"] != "done":
            break
    return found
