"""Lesson 18. Ranks begin and end together: what users see of it. `test_faults.py` has every fault in every phase."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mini_engine.assembly.llm import LLM
from mini_engine.base.errors import EngineDead, UserError
from mini_engine.distributed.tensor_parallel.pools import SharedPools
from mini_engine.distributed.tensor_parallel.processes import Ranks
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.qwen3 import DENSE, load_model
from mini_engine.pocket import POCKET_DIR
from tests.l18.ends import WAIT_SECONDS, deadline, wait_until_gone
from tests.l18.ranks import engine_over, started
from tests.l18.test_parallel import OPTIONS, PROMPTS, answers, nightly
from tests.support import checkpoint

ROOT = Path(__file__).resolve().parents[2]


@nightly
def test_biases_are_added_once_and_an_own_head_is_whole():
    path = str(checkpoint("four, with biases"))
    with started(path) as ranks:
        found = answers(engine_over(ranks, **OPTIONS))
    assert found == answers(Engine.for_model(load_model(path), **OPTIONS))


@nightly
def test_when_a_rank_dies_every_request_ends_with_a_sentence_that_names_it():
    with started() as ranks:
        engine = engine_over(ranks, **OPTIONS, scheduler_config=SchedulerConfig(max_num_seqs=2))
        assert answers(engine)[1] == [None] * 4
        chosen = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        requests = [engine.add_request(f"late {i}", ids, chosen) for i, ids in enumerate(PROMPTS)]
        engine.step()
        os.kill(ranks.processes[0].pid, signal.SIGTERM)
        with deadline(WAIT_SECONDS), pytest.raises(EngineDead) as caught:
            while True:
                engine.step()
        assert "rank 1 of 2 has ended" in str(caught.value) and str(caught.value) == engine.runner.fault
        assert all("rank 1 of 2 has ended" in request.error for request in requests), "those that wait, too"
        assert not engine.has_unfinished
        with pytest.raises(EngineDead):
            answers(engine)


@nightly
@pytest.mark.skipif(sys.platform == "win32", reason="kills a process, the POSIX way")
def test_when_a_rank_of_a_hybrid_dies_every_stream_ends_and_nothing_stays_held():
    """Giving back a state slot needs all ranks, so the clean-up of each request fails, too."""
    with LLM("pocket-hybrid", tensor_parallel_size=2, num_blocks=60, block_size=8) as llm, deadline(WAIT_SECONDS):
        engine, chosen = llm.engine, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        streams = [llm.stream(ids, chosen) for ids in PROMPTS[:3]]
        for stream in streams:
            next(stream)
        memory, rank_1 = engine.scheduler.manager.coordinator.memory[0], engine.runner.group.processes
        assert len(memory.holds) == 3
        os.kill(rank_1.pid, signal.SIGKILL)
        with pytest.raises(EngineDead) as caught:
            list(streams[0])
        assert "rank 1 of 2 has ended (killed by SIGKILL)" in str(caught.value) and str(caught.value) == engine.fault
        for stream in streams:
            *_, last = stream
            assert last.finish_reason == "error" and engine.fault in last.error
        assert not engine.has_unfinished and not engine.scheduler.manager.tables and not memory.holds
        assert len(memory.free_slots) == memory.states.max_reqs
        assert engine.scheduler.manager.blocks_by_state.held == 0
        with pytest.raises(EngineDead):
            llm.generate([PROMPTS[0]], chosen, progress=False)
    assert not rank_1.is_alive()


@pytest.mark.nightly
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


@nightly
@pytest.mark.skipif(sys.platform == "win32", reason="looks up a process by id, the POSIX way")
def test_when_rank_0_dies_the_others_end():
    code = (
        "import os, signal\n"
        "from mini_engine.distributed.tensor_parallel.processes import Ranks\n"
        "from mini_engine.families.qwen3 import DENSE\n"
        "from mini_engine.pocket import POCKET_DIR\n"
        "if __name__ == '__main__':\n"
        "    ranks = Ranks(str(POCKET_DIR), 2, DENSE.stored)\n"
        "    print(ranks.processes[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    wait_until_gone([int(done.stdout)])
    assert "Traceback" not in done.stderr, done.stderr


@nightly
def test_a_checkpoint_that_the_other_ranks_cannot_read_is_an_error(tmp_path):
    with pytest.raises(UserError), Ranks(str(tmp_path), 2, DENSE.stored) as ranks:
        ranks.join(DENSE.stored(POCKET_DIR))


@nightly
def test_layers_that_do_not_work_here_are_an_error_in_one_sentence():
    with pytest.raises(UserError) as caught:
        started(backend="packed", dtype=torch.float16)
    assert "float16" in str(caught.value) and not isinstance(caught.value, EngineDead)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="sends signals, the POSIX way")
def test_a_rank_that_is_asked_for_bytes_and_does_not_answer_is_given_up_in_time():
    with started() as ranks:
        engine = engine_over(ranks, **OPTIONS)
        blocks = SharedPools(ranks).block_bytes(engine.runner.pool)
        blocks.read([1, 2])
        os.kill(ranks.processes[0].pid, signal.SIGSTOP)
        with deadline(WAIT_SECONDS), pytest.raises(EngineDead):
            blocks.read([1, 2])


@pytest.mark.ci
@pytest.mark.skipif(sys.platform == "win32", reason="sends signals, the POSIX way")
def test_a_rank_that_dies_while_it_is_asked_for_bytes_is_named():
    with started() as ranks:
        engine = engine_over(ranks, **OPTIONS)
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        with deadline(WAIT_SECONDS), pytest.raises(EngineDead) as caught:
            SharedPools(ranks).block_bytes(engine.runner.pool).read([1])
        assert "rank 1 of 2 has ended" in str(caught.value)


@nightly
def test_a_process_may_be_rank_0_of_two_models_and_each_ends_by_itself():
    with started() as one:
        with started() as other:
            processes = list(other.processes)
            assert answers(engine_over(other, **OPTIONS)) == answers(engine_over(one, **OPTIONS))
        assert not any(process.is_alive() for process in processes), "the others end with the block"
        assert answers(engine_over(one, **OPTIONS))[1] == [None] * 4
