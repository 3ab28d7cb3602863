"""Lesson 18. A model in shares as its users meet it: `LLM(tensor_parallel_size=2)`, and `--tp 2` in every command.

`test_faults.py` has all faults of both ranks, below the commands.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.base.errors import UserError
from mini_engine.distributed.tensor_parallel.limits import check_shareable
from mini_engine.distributed.tensor_parallel.processes import Ranks
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.qwen3 import load_model
from mini_engine.pocket import POCKET_DIR
from tests.processes import WAIT_SECONDS, deadline, posix, spawned_by, wait_for, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["The capital of France is", "Once upon a time", "The capital of France is Paris. " * 4]
nightly = pytest.mark.nightly


# ---------------------------------------------------------------- refused before anything starts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 3}, []),  # `share_of` refuses these two, in words of its own
        ({"tensor_parallel_size": 0}, []),
        ({"model": "pocket-hybrid", "tensor_parallel_size": 8}, []),
        ({"cuda_graphs": True}, ["cuda_graphs"]),
        ({"backend": "fused"}, ["backend", "fused"]),
        ({"device": "cuda"}, ["cpu"]),
        ({"dtype": "float8"}, ["float8"]),
        ({"model": load_model(POCKET_DIR)}, []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_ranks_cannot_do_is_refused_before_a_process_starts(monkeypatch, options, words):
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda process: pytest.fail("a process started"))
    with pytest.raises(UserError) as caught:
        LLM(**{"tensor_parallel_size": 2, "device": "cpu"} | options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_ranks_can_do_is_not_refused():
    check_shareable(EngineConfig(num_blocks=40, backend="packed", cuda_graphs=False, kv_host_bytes=1 << 20))


# ---------------------------------------------------------------- everything an LLM does


@nightly
def test_an_llm_over_two_processes_does_what_an_llm_does():
    wishes = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=2),
        SamplingParams(temperature=0.9, seed=5, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1, stop=["zzz"]),
    ]
    options = {"num_blocks": 40, "scheduler_config": SchedulerConfig(chunked_prefill_size=7), "device": "cpu"}
    with LLM(backend="reference", **options) as one:
        expected = [one.generate(PROMPTS, wishes, progress=False) for _ in range(2)][1]
    with LLM(tensor_parallel_size=2, **options) as two:
        found = [two.generate(PROMPTS, wishes, progress=False) for _ in range(2)][1]
        processes = two.engine.runner.group.processes
        streamed = "".join(delta.text for delta in two.stream(PROMPTS[0], wishes[0]))
        assert [(a.token_ids, a.finish_reason) for a in found] == [(a.token_ids, a.finish_reason) for a in expected]
        assert streamed == expected[0].text
        assert [a.num_cached_tokens for a in found] == [a.num_cached_tokens for a in expected]
        for ours, theirs in zip(logprobs_of(found), logprobs_of(expected), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)
    assert not processes or not any(process.is_alive() for process in processes)


def logprobs_of(completions):
    return [
        [token.chosen for token in tokens]
        for completion in completions
        for tokens in (completion.logprobs, completion.prompt_logprobs)
        if tokens
    ]


@nightly
def test_an_option_that_fails_after_the_start_leaves_no_process(monkeypatch):
    started, begin = [], Ranks.__init__

    def noted(self, *args, **options):
        begin(self, *args, **options)
        started.extend(process.pid for process in self.processes)

    monkeypatch.setattr(Ranks, "__init__", noted)
    with pytest.raises(UserError):
        LLM(tensor_parallel_size=2, num_blocks=10**15, device="cpu")
    assert started
    wait_until_gone(started)


# ---------------------------------------------------------------- commands, for real


def command(*arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "mini_engine", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
        cwd=ROOT,
    )


@contextmanager
def running(*arguments):
    """Run a command; kill it if it does not end in time, so that no test waits forever."""
    process = command(*arguments, "--tp", "2", "--device", "cpu", "--num-blocks", "300")
    try:
        with deadline(3 * WAIT_SECONDS):
            yield process
    finally:
        process.kill()
        process.communicate()


each_fault = pytest.mark.parametrize(
    ("sign", "sentence"),
    [
        pytest.param(signal.SIGKILL, "rank 1 of 2 has ended (killed by SIGKILL)", id="killed"),
        pytest.param(getattr(signal, "SIGSTOP", None), "rank 1 of 2 has stopped answering", id="stopped"),
    ],
)


@contextmanager
def half_way(starts=False):
    """Run a command up to its first word, or to its ranks' start; yield it and its ranks, which are gone at the end."""
    with running("generate", "Once upon a time", "--max-tokens", "4000", "--temperature", "9") as process:
        if not starts:
            assert process.stdout.read(1)
        wait_for("ranks have been started", lambda: spawned_by(process.pid) or process.poll() is not None)
        ranks = spawned_by(process.pid)
        assert len(ranks) == 1
        yield process, ranks
        wait_until_gone(ranks)


@nightly
@posix
@pytest.mark.parametrize("starts", [True, False], ids=["starting", "answering"])
@each_fault
def test_a_command_ends_with_one_sentence_when_a_rank_is_lost(sign, sentence, starts):
    with half_way(starts) as (process, ranks):
        os.kill(ranks[0], sign)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2 and len(err.splitlines()) == 1, err
    assert (sentence.replace("has ended", "ended before it was ready") if starts else sentence) in err


@nightly
@posix
def test_ctrl_c_in_a_terminal_stops_the_answer_and_nothing_complains():
    """A terminal sends Ctrl-C to every process of the group: the ranks leave it to rank 0."""
    with half_way() as (process, ranks):
        for pid in (process.pid, *ranks):
            os.kill(pid, signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0 and err == "", err


@nightly
@posix
@pytest.mark.parametrize("busy", [True, False], ids=["answering", "idle"])
@each_fault
def test_serve_ends_by_itself_when_a_rank_is_lost(busy, sign, sentence):
    with running("serve", "--port", "0") as process:
        address = re.search(r"http://\S+(?=/v1)", process.stdout.readline())[0]
        (rank,) = spawned_by(process.pid)
        asked = {"prompt": "Once upon a time", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        with urllib.request.urlopen(request_to(address, asked | ({} if busy else {"max_tokens": 1}))) as answer:
            answer.readline()
            if not busy:
                answer.read()
            os.kill(rank, sign)
            states = health_until_gone(address)
            if busy:
                last = json.loads([line for line in answer.read().decode().splitlines() if "error" in line][-1][6:])
                assert sentence in last["error"]["message"], last
        _, err = process.communicate(timeout=WAIT_SECONDS)
        wait_until_gone([rank])
    assert 503 in states, f"/health said {states}"
    assert process.returncode != 0 and sentence in err and len(err.splitlines()) == 1, err


def request_to(address, body):
    return urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def health_until_gone(address) -> set[int]:
    """Ask /health until there is no answer; return the statuses."""
    seen, end = set(), time.monotonic() + WAIT_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=WAIT_SECONDS) as answer:
                seen.add(answer.status)
        except urllib.error.HTTPError as error:
            seen.add(error.code)
        except OSError:
            return seen
        assert time.monotonic() < end, f"the server goes on, and /health said {seen}"
        time.sleep(0.02)
