"""Lesson 18. Ranks end together, after kill -9, SIGSTOP or an exception; while loading, in a step, between steps.

In each case all ranks end, with one sentence that names the rank and the cause.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from mini_engine.base.errors import EngineDead, UserError
from mini_engine.distributed.tensor_parallel.messages import packed
from mini_engine.distributed.tensor_parallel.processes import Ranks
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import DENSE
from mini_engine.pocket import POCKET_DIR
from tests.l18.ends import Fail, SlowlyStored, read_forever, read_wrongly
from tests.l18.ranks import engine_over
from tests.processes import WAIT_SECONDS, deadline, has_ended, posix, wait_for, wait_until_gone
from tests.support import checkpoint

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.nightly, posix]
SAID = {
    signal.SIGKILL: "rank 1 of 2 has ended (killed by SIGKILL)",
    signal.SIGSTOP: "rank 1 of 2 has stopped answering (no heartbeat for 5 s)",
    Fail: "rank 1 of 2 has ended (no such block)",
}
both = pytest.mark.parametrize("transport", ["memory", "gloo"])
named = lambda fault: getattr(fault, "name", "an exception")  # noqa: E731


def begin(fault, ranks):
    """Let a fault come to rank 1."""
    if fault is Fail:
        ranks.send(Fail())
    else:
        os.kill(ranks.processes[0].pid, fault)


def engine_with_a_request(ranks):
    """Return an engine over ranks, and its only request."""
    engine = engine_over(ranks, num_blocks=20)
    return engine, engine.add_request("one", [5, 9, 11], SamplingParams(temperature=0, max_tokens=4))


def lost_in_a_step(engine):
    """Run steps until a rank is lost; return what is said."""
    with deadline(WAIT_SECONDS), pytest.raises(EngineDead) as caught:
        while True:
            engine.step()
    return str(caught.value)


@contextmanager
def shared_by(num_ranks=2, path=POCKET_DIR, read=DENSE.stored, **options):
    """Return ranks that have not joined. None of their processes is left behind."""
    with Ranks(str(path), num_ranks, read, **options) as ranks:
        pids = [process.pid for process in ranks.processes]
        yield ranks
        wait_for("all other ranks have ended", lambda: not any(p.is_alive() for p in ranks.processes))
    wait_until_gone(pids)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """What ranks make among temporary files is here, and gone at the end, as is shared memory."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("mini-engine", "pym"))]
    shared = Path("/dev/shm")
    assert not shared.is_dir() or not [path for path in shared.iterdir() if str(os.getpid()) in path.name]


# ---------------------------------------------------------------- faults of rank 1


LOADING = {
    signal.SIGKILL: (read_forever, "rank 1 of 2 ended before it was ready (killed by SIGKILL)"),
    signal.SIGSTOP: (read_forever, SAID[signal.SIGSTOP]),
    Fail: (read_wrongly, "rank 1 of 2 cannot start: the disk is on fire"),
}


@pytest.mark.parametrize(
    ("fault", "busy"),
    [*((fault, True) for fault in LOADING), (signal.SIGSTOP, False)],
    ids=lambda value: {True: "rank 0 loads, too", False: "rank 0 is ready"}.get(value) or named(value),
)
def test_a_fault_while_rank_1_loads_ends_the_start(fault, busy):
    read, sentence = LOADING[fault]
    with shared_by(read=read) as ranks:
        if fault is not Fail:
            wait_for("rank 1 sends heartbeats", lambda: ranks.others.pulse.seen[1])
            begin(fault, ranks)
            fault = None
        stored = SlowlyStored(POCKET_DIR) if busy else DENSE.stored(POCKET_DIR)
        with deadline(WAIT_SECONDS), pytest.raises(UserError) as caught:
            ranks.join(stored)
        assert str(caught.value) == sentence


def test_a_rank_that_is_stopped_while_it_imports_ends_the_start():
    with shared_by() as ranks:
        begin(signal.SIGSTOP, ranks)
        with deadline(WAIT_SECONDS), pytest.raises(UserError) as caught:
            ranks.join(DENSE.stored(POCKET_DIR))
        assert str(caught.value) == SAID[signal.SIGSTOP] and not ranks.others.pulse.seen[1]


@both
@pytest.mark.parametrize("fault", SAID, ids=named)
def test_a_fault_of_rank_1_while_rank_0_waits_for_it_in_a_collective(transport, fault):
    with shared_by(transport=transport) as ranks:
        ranks.join(DENSE.stored(POCKET_DIR))
        engine, _ = engine_with_a_request(ranks)
        engine.step()
        ranks.model.register_forward_pre_hook(lambda *_: begin(fault, ranks))  # rank 1 has the plan and is in the step
        if fault is Fail:
            ranks.send(Fail())  # it fails before it gets there
        said = lost_in_a_step(engine)
        assert said.startswith(SAID[fault] + ";") and said == ranks.fault


@pytest.mark.parametrize("fault", SAID, ids=named)
def test_a_fault_of_rank_1_between_steps_is_known_before_the_next(fault):
    with shared_by() as ranks:
        ranks.join(DENSE.stored(POCKET_DIR))
        begin(fault, ranks)
        with deadline(WAIT_SECONDS):
            wait_for("rank 0 knows", lambda: ranks.fault)
        assert ranks.fault.startswith(SAID[fault] + ";")
        with pytest.raises(EngineDead):
            ranks.tell(Fail())


@pytest.mark.parametrize("fault", [signal.SIGKILL, Fail], ids=named)
def test_the_rank_that_ended_first_is_named_not_those_whose_connections_broke(fault):
    """Ranks 1 and 2 meet rank 3 over gloo, fail in their turn, and send last words of their own."""
    path = checkpoint("one query a key head, untied")
    with shared_by(4, path, transport="gloo") as ranks:
        ranks.join(DENSE.stored(path))
        engine, _ = engine_with_a_request(ranks)
        engine.step()
        if fault is Fail:
            ranks.others.pipes[2].send_bytes(packed(Fail()))
        else:
            ranks.model.register_forward_pre_hook(lambda *_: os.kill(ranks.processes[2].pid, fault))
        assert lost_in_a_step(engine).startswith(SAID[fault].replace("rank 1 of 2", "rank 3 of 4"))


# ---------------------------------------------------------------- faults of rank 0


@contextmanager
def rank_0(*arguments):
    """Run `rank_0.py` until the place for the fault; yield the process, and that of rank 1."""
    command = [sys.executable, "-m", "tests.l18.rank_0", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    try:
        with deadline(WAIT_SECONDS):
            rank_1 = json.loads(process.stdout.readline())
            yield process, rank_1
    finally:
        process.kill()
        process.communicate()
    wait_until_gone([rank_1])


everywhere = pytest.mark.parametrize(
    ("when", "transport"), [("loading", "auto"), ("collective", "memory"), ("collective", "gloo"), ("idle", "auto")]
)


@everywhere
def test_rank_1_ends_when_rank_0_is_killed(when, transport):
    with rank_0(when, "wait", "--transport", transport) as (process, rank_1):
        process.kill()
        with deadline(WAIT_SECONDS):
            wait_until_gone([rank_1])
        assert process.communicate() == ("", "")


@everywhere
def test_rank_1_ends_when_rank_0_is_stopped_and_rank_0_says_so_when_it_goes_on(when, transport):
    with rank_0(when, "wait", "--transport", transport) as (process, rank_1):
        process.send_signal(signal.SIGSTOP)
        with deadline(WAIT_SECONDS):
            wait_for("rank 1 has ended", lambda: has_ended(rank_1))
        process.send_signal(signal.SIGCONT)
        with deadline(WAIT_SECONDS):
            _, err = process.communicate()
        how = "cannot start: " if when == "loading" else "has ended ("
        assert process.returncode == 2 and len(err.splitlines()) == 1, err
        assert err.startswith(f"rank 1 of 2 {how}rank 0 sent no heartbeat for 5 s"), err


@everywhere
def test_rank_1_ends_when_rank_0_fails(when, transport):
    with rank_0(when, "raise", "--transport", transport) as (process, rank_1):
        with deadline(WAIT_SECONDS):
            _, err = process.communicate()
            wait_until_gone([rank_1])
        words = {"loading": "the disk is on fire", "idle": "rank 0 is confused"}
        sentence = words.get(when, "rank 0 of 2 could not finish a step (rank 0 is confused); the model is incomplete")
        assert process.returncode == 2 and err.startswith(sentence) and len(err.splitlines()) == 1, err


# ---------------------------------------------------------------- no fault


def test_ranks_that_are_all_stopped_for_a_while_go_on():
    """As by Ctrl-Z in a terminal, and `fg`."""
    with rank_0("collective", "wait") as (process, rank_1):
        for sign, seconds in ((signal.SIGSTOP, 7), (signal.SIGCONT, 2)):  # longer than a rank may be silent alone
            for pid in (process.pid, rank_1):
                os.kill(pid, sign)
            time.sleep(seconds)
        assert process.poll() is None and not has_ended(rank_1)


def test_ranks_that_are_ready_wait_for_the_others_as_long_as_loading_takes():
    """Meeting has a time limit, here of two seconds; loading has none."""
    with shared_by(transport="gloo", patience=timedelta(seconds=2)) as ranks:
        assert ranks.others.replies[0].poll(WAIT_SECONDS), "rank 1 is ready"
        time.sleep(4)
        ranks.join(DENSE.stored(POCKET_DIR))
        assert not ranks.fault
        ranks.close()


def test_a_rank_that_keeps_python_s_lock_for_long_is_not_lost():
    """Its thread cannot count meanwhile. Any long call into C may do that, in rank 0's own process above all."""
    with shared_by() as ranks:
        ranks.join(DENSE.stored(POCKET_DIR))
        with deadline(WAIT_SECONDS):
            ctypes.PyDLL(None).sleep(7)
        engine, request = engine_with_a_request(ranks)
        while engine.has_unfinished:
            engine.step()
        assert request.error is None and not ranks.fault
        ranks.close()
