"""Lesson 19. Two processes, real ones: tokens are those of one process, and nothing is left.

`tests/families/test_handover.py` has every family and path, with a worker in this process.
"""

import pytest

from mini_engine import LLM
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.handover.opening import workers_of
from tests.l19.ends import (
    ASKED,
    BLOCK,
    CHUNK,
    OPTIONS,
    PROMPTS,
    answers,
    ask,
    check_nothing_is_held,
    drain,
    events,
    expected,
    receiving,
)

nightly = pytest.mark.nightly


def opened(name="pocket", **options):
    return LLM(shipped_checkpoint(name), dtype="float32", device="cpu", **OPTIONS | ASKED | options)


def wanted(prompts=PROMPTS, name="pocket"):
    return [expected(name, tuple(prompt)) for prompt in prompts]


class Fills:
    """Notes each `Filled` that arrives: how many buffers of its transfer are complete, and how many it has."""

    def __init__(self, transfers):
        self.noted, self.fill, self.transfers = [], transfers.fill, transfers
        transfers.fill = self

    def __call__(self, sender, transfer_id, num_buffers):
        self.noted.append((num_buffers, len(self.transfers.of_id[transfer_id].buffers)))
        self.fill(sender, transfer_id, num_buffers)


@pytest.mark.ci
@pytest.mark.reference
def test_a_worker_s_k_and_v_give_the_same_tokens():
    with opened() as llm:
        fills = Fills(receiving(llm.engine).transfers)
        requests = ask(llm.engine, PROMPTS[-1:])
        drain(llm.engine)
        assert [request.output_ids for request in requests] == wanted(PROMPTS[-1:])
        assert requests[0].num_cached_tokens == (len(PROMPTS[-1]) - 1) // BLOCK * BLOCK, (
            "only its end was computed here"
        )
        done, total = fills.noted[0]
        assert done <= CHUNK // BLOCK < total, "the first chunk's blocks arrived while the others were being computed"
        assert [count for count, _ in fills.noted] == sorted({count for count, _ in fills.noted})
        check_nothing_is_held(llm.engine)
        workers = workers_of(llm.engine)
        processes = [handle.process for handle in workers.handles.values()]
    assert not any(process.is_alive() for process in processes), "workers end with the LLM"


@nightly
def test_a_block_of_one_token():
    """The token behind the last block is a block, too: a state must not be taken behind that one."""
    with opened("pocket-hybrid", block_size=1, num_blocks=500) as llm:
        assert answers(llm.engine) == wanted(name="pocket-hybrid")
        assert events(llm.engine)["fallbacks"] == 0
        check_nothing_is_held(llm.engine)
