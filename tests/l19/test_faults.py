"""Lesson 19. Either side is killed or stopped at every point of the protocol: answers are right, and nothing is lost.

A sender that is stopped is noticed after five seconds and killed. A receiver that is stopped keeps its sender waiting;
one that is killed takes its sender with it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from mini_engine.base.errors import UserError
from mini_engine.handover.opening import workers_of
from tests.l19.ends import (
    PROMPTS,
    SIGNALS,
    answers,
    ask,
    build_faulty,
    build_nothing,
    check_nothing_is_held,
    drain,
    engine_with,
    events,
    expected,
    receiving,
)
from tests.processes import WAIT_SECONDS, deadline, is_alive, posix, state_of, wait_for, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]
nightly = pytest.mark.nightly
pytestmark = [pytest.mark.reference, posix]  # about the engine, not about a task
PATIENCE = 3 * WAIT_SECONDS
SENDER_POINTS = ["asked", "copying", "copied", "filled", "ending", "cancelled"]
RECEIVER_POINTS = ["asked", "filled", "copying", "cancelled"]


@pytest.fixture(autouse=True)
def no_traces():
    """Shared memory has no names, so nothing of it is left, however processes end."""
    before = set(Path("/dev/shm").glob("pym-*"))
    with deadline(PATIENCE):
        yield
    assert set(Path("/dev/shm").glob("pym-*")) <= before


@contextmanager
def faulty(when, fault, marker, **options):
    """Yield an engine whose first worker comes to a fault. No process is left behind."""
    with engine_with(lambda build: partial(build_faulty, build, when, SIGNALS[fault], marker), **options) as llm:
        yield llm.engine


def lose_one(engine, when, marker):
    """Ask so that the fault comes; check the answers, and that the worker is gone and another one is there."""
    if when == "cancelled":
        [extra] = ask(engine, [PROMPTS[2][::-1]], name="extra")
        while not receiving(engine).transfers.of_id:
            engine.step()
        engine.abort(extra.id)
    requests = ask(engine)
    drain(engine)
    assert [request.output_ids for request in requests] == [expected("pocket", prompt) for prompt in PROMPTS]
    wait_for("the fault has come", marker.exists)
    workers = workers_of(engine)
    wait_for("the loss is noticed, and another worker is ready", lambda: list(workers.handles) == [2])
    assert not is_alive(json.loads(marker.read_text(encoding="utf-8"))), "a lost worker is dead before it is replaced"
    check_nothing_is_held(engine)
    assert events(engine)["losses"] == 1


def works_again(engine):
    before = events(engine)["transfers"]
    assert answers(engine, [PROMPTS[0][::-1]], name="new") == [expected("pocket", PROMPTS[0][::-1])]
    assert events(engine)["transfers"] == before + 1, "the new worker computes prompts"


@pytest.mark.ci
def test_answers_are_right_though_a_worker_dies_in_the_middle_of_a_copy(tmp_path):
    marker = tmp_path / "marker"
    with faulty("copying", "killed", marker) as engine:
        lose_one(engine, "copying", marker)


@nightly
@pytest.mark.parametrize("fault", SIGNALS)
@pytest.mark.parametrize("when", SENDER_POINTS)
def test_a_worker_is_lost(when, fault, tmp_path):
    marker = tmp_path / "marker"
    with faulty(when, fault, marker) as engine:
        lose_one(engine, when, marker)
        works_again(engine)


@nightly
def test_one_of_two_workers_is_lost(tmp_path):
    marker = tmp_path / "marker"
    with faulty("filled", "killed", marker, num_workers=2) as engine:
        assert answers(engine) == [expected("pocket", prompt) for prompt in PROMPTS]
        wait_for("a third worker is ready", lambda: sorted(workers_of(engine).handles)[-1] == 3)
        assert len(workers_of(engine).handles) == 2
        check_nothing_is_held(engine)


# ---------------------------------------------------------------- before the first byte


@nightly
@pytest.mark.parametrize("fault", SIGNALS)
def test_a_worker_that_is_lost_before_it_is_ready_ends_the_start(fault, tmp_path):
    with pytest.raises(UserError) as caught, faulty("layout", fault, tmp_path / "marker"):
        pass
    sentence = str(caught.value)
    assert len(sentence.splitlines()) == 1 and {"killed": "-9", "stopped": "5 s"}[fault] in sentence, sentence
    assert not is_alive(json.loads((tmp_path / "marker").read_text(encoding="utf-8")))


@nightly
def test_a_script_that_starts_itself_again_is_told_how_to_be_written(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from mini_engine import LLM\nLLM(prefill_workers=1)\n", encoding="utf-8")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 1 and "exit code 1" in done.stderr
    assert '`if __name__ == "__main__":`' in done.stderr.splitlines()[-1], "each worker runs the script again"


@nightly
def test_a_worker_that_cannot_start_says_why():
    with pytest.raises(UserError) as caught, engine_with(lambda build: partial(build_nothing, "the disk is on fire")):
        pass
    assert "the disk is on fire" in str(caught.value)


@nightly
@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        ({"dtype": "bfloat16"}, "kv dtype"),
        ({"block_size": 16}, "block size"),
        ({"kv_dtype": "int8"}, "kv dtype"),
        ({"name": "pocket-hybrid"}, "weights"),
        ({"name": "pocket-windows"}, "config"),
    ],
    ids=lambda value: str(value),
)
def test_a_worker_that_is_unlike_its_receiver_is_refused(theirs, field):
    with pytest.raises(UserError) as caught, engine_with(theirs=theirs):
        pass
    sentence = str(caught.value)
    assert field in sentence and len(sentence.splitlines()) == 1 and caught.value.param == "prefill_workers"


# ---------------------------------------------------------------- faults of the receiver


@contextmanager
def receiver(when, fault):
    """Run `receiver.py`; yield the process and its worker's."""
    command = [sys.executable, "-m", "tests.l19.receiver", when, fault]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    worker = None
    try:
        [worker] = json.loads(process.stdout.readline())
        yield process, worker
    finally:
        process.kill()
        process.communicate()
        if worker is not None:
            wait_until_gone([worker])


@nightly
@pytest.mark.parametrize("when", RECEIVER_POINTS)
def test_a_worker_ends_when_its_receiver_is_killed(when):
    with receiver(when, "SIGKILL") as (process, worker):
        assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
        wait_until_gone([worker])


@nightly
@pytest.mark.parametrize("when", RECEIVER_POINTS)
def test_a_receiver_that_was_stopped_goes_on(when):
    with receiver(when, "SIGSTOP") as (process, worker):
        wait_for("the receiver stands still", lambda: state_of(process.pid) == "T")
        time.sleep(7)  # longer than a worker may be silent
        assert is_alive(worker), "its receiver lives"
        os.kill(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == 0, err
        assert json.loads(out) == [expected("pocket", prompt) for prompt in PROMPTS]
