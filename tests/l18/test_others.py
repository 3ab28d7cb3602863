"""Lesson 18. What rank 0 says of ranks that have ended, without processes."""

from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from mini_engine.distributed.tensor_parallel.others import Others
from mini_engine.distributed.tensor_parallel.pulse import pulse_bytes
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock

KILLED, FAILED = -15, 1


def others(*endings, has_joined=True):
    """Return rank 0's view of ranks that have ended, each with an exit code and last words."""
    found = Others(SimpleNamespace(num_ranks=1 + len(endings), pulse=SharedBlock(pulse_bytes(1 + len(endings)))))
    found.has_joined = has_joined
    for code, words in endings:
        ours, theirs = Pipe()
        if words:
            theirs.send_bytes(words.encode())
        theirs.close()
        found.pipes.append(ours)
        found.processes.append(SimpleNamespace(exitcode=code, join=lambda: None))
    return found


@pytest.mark.parametrize(
    ("code", "words", "joined", "sentence"),
    [
        (KILLED, "", True, "rank 1 of 2 has ended (killed by SIGTERM)"),
        (FAILED, "no such block", True, "rank 1 of 2 has ended (no such block)"),
        (3, "", True, "rank 1 of 2 has ended (exit code 3)"),
        (KILLED, "", False, "rank 1 of 2 ended before it was ready (killed by SIGTERM)"),
        (FAILED, "no such file", False, "rank 1 of 2 cannot start: no such file"),
    ],
)
def test_the_sentence_says_how_a_rank_ended(code, words, joined, sentence):
    assert others((code, words), has_joined=joined).ending_of([1]) == sentence


def test_a_rank_that_died_of_an_error_that_python_printed_points_to_it():
    """A script without the guard starts itself again in each rank: that error is in the rank's own output."""
    said = others((FAILED, ""), has_joined=False).ending_of([1])
    assert said.startswith("rank 1 of 2 ended before it was ready (exit code 1)") and "__main__" in said


def test_of_ranks_that_end_at_once_the_killed_one_is_named():
    """The others say that a connection broke, which is true, and not the cause."""
    ended = others((FAILED, "connection closed by peer"), (KILLED, ""), (FAILED, "connection closed by peer"))
    assert ended.ending_of([1, 2, 3]) == "rank 2 of 4 has ended (killed by SIGTERM)"


def test_the_first_loss_is_the_one_that_is_told_and_ends_all_waiting():
    """The ends of the others follow from it."""
    view, killed, interrupted = others((KILLED, ""), (KILLED, "")), [], []
    view.place.transport = SimpleNamespace(interrupt=lambda: interrupted.append(True))
    for process in view.processes:
        process.kill = lambda: killed.append(True)
    view.lose("rank 2 was killed")
    assert (len(killed), len(interrupted)) == (2, 1), "all ranks are ended, and this one waits for none of them"
    view.lose("rank 1 has ended, too")
    assert view.lost == "rank 2 was killed"
