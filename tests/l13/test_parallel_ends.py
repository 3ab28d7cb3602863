"""Lesson 13. Ranks begin and end together: one group at a time, no rank outlives another, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mini_engine.engine.engine import Engine
from mini_engine.errors import UserError
from mini_engine.parallel.build import parallel_engine
from mini_engine.parallel.ranks import Ranks
from mini_engine.pocket import POCKET_DIR
from mini_engine.weights import load_model
from tests.l13.test_parallel import OPTIONS, answers, slow
from tests.support import checkpoint

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 60


@slow
def test_biases_are_added_once_and_an_own_head_is_whole():
    path = str(checkpoint("four, with biases"))
    with Ranks(path, 2) as ranks:
        found = answers(parallel_engine(ranks, **OPTIONS))
    assert found == answers(Engine.for_model(load_model(path), **OPTIONS))


@slow
def test_when_a_rank_dies_requests_end_with_a_sentence_that_names_it():
    with Ranks(str(POCKET_DIR), 2) as ranks:
        engine = parallel_engine(ranks, **OPTIONS)
        assert answers(engine)[1] == [None] * 4
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        begun = time.monotonic()
        errors = answers(engine)[1]
        assert all("rank 1 of 2 has ended" in error for error in errors), errors
        assert time.monotonic() - begun < WAIT_SECONDS


@slow
@pytest.mark.skipif(sys.platform == "win32", reason="looks up a process by id, the POSIX way")
def test_when_rank_0_dies_the_others_end():
    code = (
        "import os, signal\n"
        "from mini_engine.parallel.ranks import Ranks\n"
        "from mini_engine.pocket import POCKET_DIR\n"
        "if __name__ == '__main__':\n"
        "    ranks = Ranks(str(POCKET_DIR), 2)\n"
        "    print(ranks.processes[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    other, deadline = int(done.stdout), time.monotonic() + WAIT_SECONDS
    while is_alive(other):
        assert time.monotonic() < deadline, "rank 1 outlived rank 0"
        time.sleep(0.1)
    assert "rank 1 of 2 ends" in done.stderr and "Traceback" not in done.stderr, done.stderr


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@slow
def test_a_checkpoint_that_the_other_ranks_cannot_read_is_an_error(tmp_path):
    with pytest.raises(UserError):
        Ranks(str(tmp_path), 2)


@slow
def test_one_process_is_rank_0_once_at_a_time():
    with Ranks(str(POCKET_DIR), 2), pytest.raises(UserError):
        Ranks(str(POCKET_DIR), 2)
    with Ranks(str(POCKET_DIR), 2) as ranks:
        processes = list(ranks.processes)
        assert answers(parallel_engine(ranks, **OPTIONS))[1] == [None] * 4
    assert not any(process.is_alive() for process in processes), "the others end with the block"
