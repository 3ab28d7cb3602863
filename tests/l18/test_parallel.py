"""Lesson 18. A model in two processes: the tokens of one process, and an end for all ranks when one is lost.

`tests/families/test_ranks.py` has every path, `test_faults.py` every fault in every phase.
"""

import os
import signal

import pytest
import torch

from mini_engine.base.errors import EngineDead, UserError
from mini_engine.distributed.tensor_parallel.pools import SharedPools
from mini_engine.engine.engine import Engine
from mini_engine.families.qwen3 import load_model
from mini_engine.pocket import POCKET_DIR
from tests.l18.ranks import answers, engine_over, started
from tests.processes import WAIT_SECONDS, deadline, posix

nightly = pytest.mark.nightly
OPTIONS = {"num_blocks": 60, "block_size": 8}


@pytest.mark.ci
def test_tokens_are_those_of_one_process():
    alone = Engine.for_model(load_model(POCKET_DIR), **OPTIONS)
    with started() as ranks:
        engine = engine_over(ranks, **OPTIONS)
        for _ in range(2):
            assert answers(engine) == answers(alone)
        assert engine.scheduler.manager.coordinator.prefixes.stats.found_tokens > 0, "then prefixes are shared"


@nightly
def test_a_process_may_be_rank_0_of_two_models_and_each_ends_by_itself():
    with started() as one:
        with started() as other:
            processes = list(other.processes)
            assert answers(engine_over(other, **OPTIONS)) == answers(engine_over(one, **OPTIONS))
        assert not any(process.is_alive() for process in processes), "the others end with the block"
        answers(engine_over(one, **OPTIONS))


@nightly
def test_layers_that_do_not_work_here_are_an_error_in_one_sentence():
    with pytest.raises(UserError) as caught:
        started(backend="packed", dtype=torch.float16)
    assert "float16" in str(caught.value) and not isinstance(caught.value, EngineDead)


@nightly
def test_a_step_that_is_interrupted_ends_the_ranks_because_they_are_out_of_step():
    """Otherwise the next plan would meet ranks that still add up the layers of the last one."""
    with started() as ranks:
        engine = engine_over(ranks, **OPTIONS)
        answers(engine)
        handle = ranks.model.register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        with deadline(WAIT_SECONDS):
            with pytest.raises(KeyboardInterrupt):
                answers(engine)
            handle.remove()
            with pytest.raises(EngineDead) as caught:
                engine.step()
        assert "interrupted" in str(caught.value)


@pytest.mark.ci
@posix
def test_a_rank_that_dies_while_it_is_asked_for_bytes_is_named():
    with started() as ranks:
        engine = engine_over(ranks, **OPTIONS)
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        with deadline(WAIT_SECONDS), pytest.raises(EngineDead) as caught:
            SharedPools(ranks).block_bytes(engine.runner.pool).read([1])
        assert "rank 1 of 2 has ended" in str(caught.value)
