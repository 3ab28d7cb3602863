"""Lesson 18. Signs of life, tick by tick: ranks are objects here, and time is what the test makes of it."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.distributed.tensor_parallel import pulse as module
from mini_engine.distributed.tensor_parallel.pulse import (
    SILENT_TICKS,
    STOPPED_TICKS,
    TICK_SECONDS,
    Pulse,
    is_stopped,
    pulse_bytes,
)

NOBODY = 0  # no process that a test has started


def ranks(num_ranks=2):
    """Return the pulses of all ranks, over memory that is not even shared."""
    block = SimpleNamespace(buffer=memoryview(bytearray(pulse_bytes(num_ranks))))
    return [Pulse(rank, num_ranks, block) for rank in range(num_ranks)]


@pytest.fixture
def stopped(monkeypatch):
    """What the operating system says of every process; a test may change it."""
    answer = SimpleNamespace(now=True)
    monkeypatch.setattr(module, "is_stopped", lambda pid: answer.now)
    return answer


def lost(pulse, rank=1):
    return pulse.seconds_lost(rank, NOBODY)


def test_a_stopped_rank_is_lost_after_so_many_ticks_and_no_earlier(stopped):
    rank_0, rank_1 = ranks()
    rank_1.tick()
    rank_0.tick()
    for _ in range(STOPPED_TICKS - 1):
        rank_0.tick()
        assert not lost(rank_0)
    rank_0.tick()
    assert lost(rank_0) == STOPPED_TICKS * TICK_SECONDS
    assert lost(rank_0) + TICK_SECONDS <= 6, "ten seconds are promised, and what is lost has to be ended, too"


def test_a_watcher_that_slept_does_not_accuse_those_that_slept_with_it(stopped, monkeypatch):
    """Ctrl-Z, or a laptop's lid: clocks go on, ticks do not. Whoever wakes up first must not end the others."""
    monkeypatch.setattr("time.monotonic", lambda: 1e6)
    rank_0, rank_1 = ranks()
    for _ in range(10):
        rank_0.tick()
        rank_1.tick()
        monkeypatch.setattr("time.monotonic", lambda: 2e6)
        for _ in range(STOPPED_TICKS - 1):  # rank 0 is awake a while before rank 1
            rank_0.tick()
        assert not lost(rank_0)


def test_a_rank_that_is_silent_but_runs_is_given_a_minute(stopped):
    """It may be in a call into C that keeps Python's lock, as `sorted` does with a long list."""
    stopped.now = False
    rank_0, rank_1 = ranks()
    rank_1.tick()
    rank_0.tick()
    for tick in range(1, SILENT_TICKS):
        rank_0.tick()
        assert not lost(rank_0), f"silent for {tick} ticks, and its process runs: ask the operating system first"
    rank_0.tick()
    assert lost(rank_0) == SILENT_TICKS * TICK_SECONDS


def test_a_rank_that_is_still_importing_is_lost_only_if_it_is_stopped(stopped):
    stopped.now = False
    rank_0, _ = ranks()
    for _ in range(10 * SILENT_TICKS):
        rank_0.tick()
        assert not lost(rank_0)
    stopped.now = True
    assert lost(rank_0)


def test_each_rank_is_watched_on_its_own(stopped):
    rank_0, rank_1, rank_2 = ranks(3)
    for _ in range(STOPPED_TICKS + 1):
        rank_0.tick()
        rank_2.tick()
    assert lost(rank_0, 1) and lost(rank_2, 1) and not lost(rank_0, 2) and not lost(rank_2, 0)
    rank_1.tick()
    assert not lost(rank_1, 0) and not lost(rank_1, 2), "the stopped one wakes up, and must not accuse either"


@given(st.lists(st.integers(0, 2), max_size=150))
def test_silence_is_what_the_watcher_ticked_since_it_last_saw_a_change(order):
    """Ranks tick in any order; a model of one line says what each has seen of each."""
    all_ranks = ranks(3)
    count, seen, silence = [0] * 3, [[0] * 3 for _ in range(3)], [[0] * 3 for _ in range(3)]
    for rank in order:
        all_ranks[rank].tick()
        count[rank] += 1
        silence[rank] = [
            0 if now != was else past + 1 for now, was, past in zip(count, seen[rank], silence[rank], strict=True)
        ]
        seen[rank] = list(count)
        assert all_ranks[rank].silence == silence[rank]


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals, the POSIX way")
def test_the_operating_system_says_which_process_is_stopped():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(process.pid)
        for sign, expected in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
            process.send_signal(sign)
            end = time.monotonic() + 60
            while is_stopped(process.pid) is not expected:  # signals arrive when they like
                assert time.monotonic() < end, f"after {sign.name} is_stopped still says {not expected}"
    finally:
        process.kill()
        process.communicate()
    assert not is_stopped(process.pid), "gone"
    assert not is_stopped(os.getpid())
