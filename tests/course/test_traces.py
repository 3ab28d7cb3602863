"""Course machinery. Recorded traces: they match this engine, they are consistent, and a bug shows in them.

Protects readers from a picture of what the engine does not do, and students from `check N --trace` showing the
course's run as theirs.
"""

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

from scripts.traces import record as recording
from scripts.traces.pictures import PLAYER, is_current
from scripts.traces.tape import VERSION, read_trace

import pytest
import torch

from lessons._course.catalog import read_lessons
from lessons._course.places import WORK_VARIABLE, Places
from mini_engine.engine.engine import Engine
from mini_engine.engine.loop import generate
from mini_engine.engine.offline import generate_all
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.no_cache import NoCache, Recompute
from tests.course.proofs import written

PLACES = Places.find()
PATHS = {
    read_trace(path.read_text(encoding="utf-8"))["id"]: path for path in sorted(recording.LESSONS.glob("*/*.trace.js"))
}
TRACES = {name: read_trace(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}
MOST_BYTES = 40_000
MOST_SAID = 95  # characters of a sentence: one line under a picture
each_trace = pytest.mark.parametrize("name", TRACES)


def test_each_trace_has_its_recorder():
    assert set(TRACES) == set(recording.RECORDERS)


@each_trace
def test_recorded_again_a_trace_is_the_committed_one(name):
    if name == "l7-mailboxes":
        pytest.importorskip("fastapi", reason="needs the extra 'server'")
    tape = recording.record(name)
    assert tape.text == PATHS[name].read_text(encoding="utf-8"), (
        f"{PATHS[name].name} is not what the engine does now: python -m scripts.traces.record, and look at what changed"
    )
    assert is_current(PATHS[name], tape), "its picture was drawn from something else: python -m scripts.traces.record"


@each_trace
def test_a_trace_is_small_and_has_what_a_player_needs(name):
    trace, path = TRACES[name], PATHS[name]
    assert trace["version"] == VERSION and trace["id"] == name and trace["title"]
    assert path.as_posix().endswith("/" + trace["file"])
    assert (PLAYER / "views" / f"{trace['kind']}.js").is_file()
    assert 8 <= len(trace["frames"]) <= 30
    assert len(path.read_bytes()) < MOST_BYTES
    states = {frozenset(frame) - {"ask"} for frame in trace["frames"]}
    assert len(states) == 1, "every frame must have the same keys, so that a view never misses one"
    says = [frame["say"] for frame in trace["frames"]]
    assert all(says)
    assert not (long := [say for say in says if len(say) > MOST_SAID]), f"over a line on a laptop, shorten: {long}"


def test_the_walk_through_the_engine_shows_what_its_pool_holds_and_what_plain_generate_answers():
    """K of every slot in the last frame is that of the token shown in it, as another pool has it for the whole text."""
    tape = recording.record("engine")
    last, told = tape.frames[-1], tape.scene["requests"]
    for request in last["requests"]:
        prompt_ids, length = told[request["name"]]["ids"], len(request["answer"])
        plain = generate(tape.model, NoCache(), Recompute(), prompt_ids, length)
        assert request["answer"] == [tape.tokenizer.decode([token]) for token in plain]
    alone = Engine.for_model(tape.model, num_blocks=9, block_size=4, kernel="reference")
    generate_all(alone, [told["C"]["ids"]], SamplingParams(temperature=0, max_tokens=1), progress=False)
    assert len(last["slots"]) == 4 * len(last["tree"]) == 20
    for layer, expected in zip(tape.engine.runner.pool.K, alone.runner.pool.K, strict=True):
        for slot, name, position in last["slots"]:  # A's and B's tokens are the beginning of C's
            got = layer.flatten(0, 1)[slot]
            assert torch.allclose(got, expected.flatten(0, 1)[4 + position], atol=1e-4), f"{name}'s token {position}"


COMMIT, RANKS = "kv.contiguous.CachedSequence.commit", "distributed.tensor_parallel"
BUGS = [  # a trace, a function of the engine, and what a bug makes of it
    ("l0-work", COMMIT, lambda _: lambda self, meta: None),
    ("l1-reserved", COMMIT, lambda _: lambda self, meta: setattr(self, "cur_len", meta.kv_len + 1)),
    ("l7-mailboxes", "engine.mailbox.merge", lambda _: lambda first, second: first),
    ("l8-prompts", "kv.radix_node.Node.path", lambda _: lambda self: iter([self] if self.parent else [])),
    ("l9-packing", "layers.pack.interleave", lambda _: lambda rows, tiles: None),
    ("l10-capture", "gpu.graphs.DecodeBuffers.fill", lambda _: lambda self, step, size: None),
    ("l15-windows", "windows.window_table.WindowTable.slide", lambda _: lambda self, first: []),
    ("l16-latents", "latents.reading.expand", lambda right: lambda c, r, *rest: right(c, 0 * r, *rest)),
    ("l17-bits", "quantized.rotation.rotate", lambda _: lambda x: x),
    ("l18-ranks", f"{RANKS}.vocabulary.looked_up", lambda _: lambda lookup, ids, rows: lookup(ids % len(rows))),
    ("l19-handover", "handover.sender.SendingConnector._fill", lambda _: lambda self, sending, payloads: None),
    ("engine", "kv.radix.RadixTree.lock", lambda _: lambda self, node: None),
    ("l20-agents", "agents.sessions.Sessions.close", lambda _: lambda self, session, namespace: True),
]


@pytest.mark.nightly
@pytest.mark.parametrize("name, place, bug", BUGS)
def test_a_bug_in_the_engine_shows_in_the_trace(name, place, bug, monkeypatch):
    """A recorder that computed anything itself would show what should happen instead of what does."""
    if name == "l7-mailboxes":
        pytest.importorskip("fastapi", reason="needs the extra 'server'")
    place = f"mini_engine.{place}"
    monkeypatch.setattr(place, bug(pkgutil.resolve_name(place)))
    told = read_trace(recording.record_whatever_happens(name).text)["frames"]
    assert [frame | {"say": ""} for frame in told] != [frame | {"say": ""} for frame in TRACES[name]["frames"]]


def check_trace(number: int, work: Path, *options: str) -> subprocess.CompletedProcess:
    """`check N --trace`, with `work` as the student's folder."""
    command = [sys.executable, "-m", "lessons", "check", str(number), "--trace", *options]
    env = os.environ | {WORK_VARIABLE: str(work)}
    return subprocess.run(command, cwd=PLACES.root, env=env, capture_output=True, encoding="utf-8", check=False)


def fill_with_the_reference(number: int, work: Path) -> Path:
    """The student's folder of a lesson, with the reference's modules in it."""
    lesson = next(lesson for lesson in read_lessons(PLACES) if lesson.number == number)
    folder = work / f"l{number}"
    folder.mkdir()
    for module in lesson.modules:
        source = PLACES.root / module
        (folder / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def traces_of(page: Path) -> dict:
    text = page.read_text(encoding="utf-8").partition("window.KV_TRACES = ")[2].partition(";</script>")[0]
    return json.loads(text)


@pytest.mark.nightly
def test_a_right_run_of_the_students_own_is_the_courses(tmp_path):
    folder = fill_with_the_reference(2, tmp_path)
    done = check_trace(2, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = traces_of(folder / "trace.html")
    assert list(shown) == ["mine"] and shown["mine"]["frames"] == TRACES["l2-pool"]["frames"]


@pytest.mark.nightly
def test_a_run_at_a_stop_is_the_courses(tmp_path):
    """Tasks 3 to 5 are beyond lesson 10's core; a run with a core task missing is refused."""
    lesson = next(lesson for lesson in read_lessons(PLACES) if lesson.number == 10)
    written(lesson, tmp_path, [1])
    assert "Task 2 is not written yet" in check_trace(10, tmp_path).stderr
    written(lesson, tmp_path, [1, 2])
    done = check_trace(10, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert traces_of(tmp_path / "l10" / "trace.html")["mine"]["frames"] == TRACES["l10-capture"]["frames"]


@pytest.mark.nightly
def test_a_wrong_run_shows_what_the_students_own_code_does(tmp_path):
    folder = fill_with_the_reference(2, tmp_path)
    file = folder / "allocator.py"
    right = "self.free_blocks[cut:][::-1]"
    source = file.read_text(encoding="utf-8")
    assert right in source
    file.write_text(source.replace(right, "self.free_blocks[cut:]"), encoding="utf-8")
    done = check_trace(2, tmp_path, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1 and not told["equal"] and told["differs_at"] == 1
    shown = traces_of(Path(told["page"]))
    assert shown["mine"]["frames"][1]["requests"][0]["blocks"] == [1, 0]
    assert shown["course"]["frames"] == TRACES["l2-pool"]["frames"]
    assert not any("ask" in frame for frame in shown["mine"]["frames"]), "its answers would be those of another run"


@pytest.mark.nightly
def test_a_run_that_fails_is_shown_up_to_there(tmp_path):
    folder = fill_with_the_reference(6, tmp_path)
    file = folder / "detokenizer.py"
    source = file.read_text(encoding="utf-8")
    right = "        text = self.held + text\n"
    assert right in source
    bug = "        if 'U' in text:\n            raise KeyError('U')\n"
    file.write_text(source.replace(right, right + bug), encoding="utf-8")
    done = check_trace(6, tmp_path, "--no-open")
    assert done.returncode == 1
    last = traces_of(folder / "trace.html")["mine"]["frames"][-1]
    assert "KeyError" in last["say"] and last["shown"] == "A café: 5 €"


@pytest.mark.nightly
def test_what_cannot_be_traced_is_said_in_a_sentence(tmp_path):
    assert len(check_trace(6, tmp_path).stderr.splitlines()) == 1
    folder = fill_with_the_reference(6, tmp_path)
    (folder / "tokenizer.py").write_text("def broken(:\n", encoding="utf-8")
    done = check_trace(6, tmp_path)
    assert done.returncode == 2 and done.stderr and "Traceback" not in done.stderr
