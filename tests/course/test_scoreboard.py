"""Course machinery. `bench.py scoreboard` replaces a kept file only by a complete run, and its suites can be asked for.

Protects the pages' figures from half a run, from one without an engine that the page has, and from Ctrl-C.
"""

import json
import signal
from argparse import Namespace

from scripts.bench import scoreboard
from scripts.bench.command import suites
from scripts.bench.scoreboard_parts import PARTS, chosen
from scripts.pages import measured
from scripts.pages.generated import WRITE

import pytest


def report(*engines: str, notes=()) -> dict:
    rows = [{"load": "decode", "engine": name, "tokens/s": 10.0, "ours is ×": 1.25} for name in engines]
    return {"rows": rows, "notes": [*notes]}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(scoreboard, "ASIDE", tmp_path / "aside")
    return tmp_path / "page" / "peers.json"


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (report("ours"), "without vllm"),
        (report("ours", "vllm", notes=["left out from here on: vllm; it broke"]), "left out from here on"),
    ],
)
def test_an_incomplete_run_goes_aside_and_leaves_the_kept_file(place, new, why):
    scoreboard.kept(report("ours", "vllm"), place)
    state = scoreboard.kept(new, place)
    assert state.startswith(scoreboard.LACKS) and why in state
    assert scoreboard.contenders(json.loads(place.read_text(encoding="utf-8"))) == {"ours", "vllm"}
    assert json.loads((place.parents[1] / "aside" / "page" / "peers.json").read_text(encoding="utf-8")) == new


def test_a_run_with_more_engines_replaces_the_kept_file_and_leaves_no_other_file(place):
    scoreboard.kept(report("ours"), place)
    scoreboard.kept(report("ours", "vllm"), place)
    assert scoreboard.contenders(json.loads(place.read_text(encoding="utf-8"))) == {"ours", "vllm"}
    assert [file.name for file in place.parent.iterdir()] == ["peers.json"], "no partial file stays"


def test_after_ctrl_c_the_suite_has_ended_complete_files_stay_and_the_exit_code_says_so(place, monkeypatch):
    signals = []

    class Suite:
        def __init__(self, command, **_) -> None:
            self.command = command

        def wait(self, seconds=None) -> int:
            if "step" in self.command and not signals:
                raise KeyboardInterrupt
            file = self.command[self.command.index("--json") + 1]
            scoreboard.save_text(scoreboard.Path(file), json.dumps(report("ours", "vllm")))
            return 0

        def send_signal(self, number) -> None:
            signals.append(number)

    monkeypatch.setattr(scoreboard, "Popen", Suite)
    args = Namespace(only=["9"], quick=False, out=place.parent, rounds=None)
    found = scoreboard.run(args)
    states = {row["file"]: row["what became of it"] for row in found.more}
    assert states["l9_speed/peers.json"] == "written" and states["l9_speed/step.json"] == scoreboard.STOPPED
    assert "l9_speed/shared.json" not in states, "nothing runs after Ctrl-C"
    assert signals == [signal.SIGINT], "the suite is asked to end, so that it ends its servers"
    assert scoreboard.finish(found, args) == 130
    assert found.rows[0]["÷ vllm"] == 1.25


def test_every_part_is_a_suite_with_a_file_of_its_own():
    assert {part.suite for part in PARTS} <= set(suites())
    assert len({part.file for part in PARTS}) == len(PARTS), "two runs would overwrite each other's file"
    assert sum(part.quick_seconds for part in chosen([], quick=True)) <= 300, "--quick promises five minutes"


@pytest.mark.parametrize("page", measured.files(), ids=lambda page: page.parent.name)
def test_a_page_s_tables_are_those_of_its_kept_runs(page):
    text = page.read_text(encoding="utf-8")
    assert text == measured.files()[page], f"the kept runs of {page.parent.name} say something else: {WRITE}"


def test_every_table_is_of_a_run_that_the_scoreboard_makes():
    assert {table.file for table in measured.TABLES} <= {part.file for part in PARTS}
