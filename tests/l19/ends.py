"""Lesson 19. Shared by the tests with processes: engines with workers, and workers that come to a bad end."""

import functools
import json
import os
import signal
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mini_engine import LLM
from mini_engine.assembly.build import build_engine, build_worker
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.loading import load
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.distributed.routing.policy import PrefixScore
from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.handover.opening import worker_config, workers_of
from mini_engine.handover.protocol import Ended, Filled
from mini_engine.handover.stage import State
from mini_engine.handover.workers import PrefillWorkers
from mini_engine.text.tokenizer import Tokenizer
from tests.processes import wait_for
from tests.support import some_ids

BLOCK, CHUNK, NEW = 8, 32, 8
LENGTHS = (75, 130, 200)
PROMPTS = [tuple(some_ids(length, 2000, seed=length)) for length in LENGTHS]
OPTIONS = {
    "num_blocks": 300,
    "block_size": BLOCK,
    "backend": "reference",
    "kernel": "torch",
    "scheduler_config": SchedulerConfig(chunked_prefill_size=CHUNK),
}
ASKED = {"prefill_workers": 1, "handover_min_tokens": 0}


@functools.cache
def expected(name, prompt, max_tokens=NEW, **params):
    """Return a prompt's answer without workers; each is computed once per run."""
    with LLM(shipped_checkpoint(name), **OPTIONS) as llm:
        return answers(llm.engine, [prompt], max_tokens, **params)[0]


def ask(engine, prompts=PROMPTS, max_tokens=NEW, name="r", **params):
    """Add a greedy request for each prompt; the caller runs the steps."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
    return [engine.add_request(f"{name}{number}", list(ids), params) for number, ids in enumerate(prompts)]


def drain(engine):
    while engine.has_unfinished:
        engine.step()


def answers(engine, prompts=PROMPTS, max_tokens=NEW, name="r", **params):
    """Answer prompts together; return the tokens."""
    requests = ask(engine, prompts, max_tokens, name, **params)
    drain(engine)
    assert [request.error for request in requests] == [None] * len(requests)
    return [request.output_ids for request in requests]


def receiving(engine):
    """Return the connector of an engine with workers."""
    connector = engine.scheduler.manager.coordinator.connector
    return getattr(connector, "workers", connector)


def events(engine):
    """Return how often each thing has happened so far."""
    return dict(receiving(engine).stats[0].events)


def check_nothing_is_held(engine, seconds=120):
    """Wait until no buffer is a sender's, then check that nothing is left of any transfer on either side."""
    connector, workers = receiving(engine), workers_of(engine)
    states = connector.transfers.buffers.states
    wait_for("all buffers are free", lambda: set(states) == {State.FREE}, seconds)
    assert not connector.asked and not connector.taken
    wait_for("no transfer is left", lambda: not connector.transfers.of_id)
    assert [handle.num_held for handle in workers.handles.values()] == [0] * len(workers.handles)
    manager = engine.scheduler.manager
    assert not manager.tables and manager.num_free_blocks == manager.num_usable_blocks


# ---------------------------------------------------------------- faults in a worker's process


def noting(marker: Path, fault: int) -> None:
    """Write down this process and end or stop it, unless another one has been here before."""
    try:
        with marker.open("x", encoding="utf-8") as file:
            file.write(json.dumps(os.getpid()))
    except FileExistsError:
        return
    os.kill(os.getpid(), fault)


def build_faulty(build, when: str, fault: int, marker: Path, block, say):
    """Build a worker that comes to `fault` at the point `when`, once: the worker that takes its place is sound."""
    strike = partial(noting, marker, fault)

    def say_and_strike(message):
        if (when, type(message)) in (("copied", Filled), ("ending", Ended)):
            strike()
        say(message)
        if (when, type(message)) == ("filled", Filled):
            strike()

    built = build(block, say_and_strike)
    connector = built.connector
    if when == "layout":
        strike()
    if when == "asked":
        connector.begin = after(connector.begin, strike)
    if when == "cancelled":
        connector.end = before(connector.end, lambda number, error="", held=0: error == "cancelled" and strike())
    if when == "copying":
        connector.stage.write = half_written(connector.stage, strike)
    return built


def build_nothing(why: str, block, say):
    """A worker that cannot start."""
    raise ValueError(why)


def after(call, then):
    def both(*args):
        call(*args)
        then()

    return both


def before(call, first):
    def both(*args):
        first(*args)
        call(*args)

    return both


def half_written(stage, strike):
    """Return a `Stage.write` during which the third buffer is written in part."""
    write, count = stage.write, iter(range(1000))

    def slowly(buffer, payload):
        if next(count) == 2:
            write(buffer, payload[: len(payload) // 2])
            strike()
        write(buffer, payload)

    return slowly


@contextmanager
def engine_with(build=None, name="pocket", num_workers=1, theirs=None, **options):
    """Yield an LLM whose workers are built so, by default as ever. They are gone at the end.

    Args:
        build: makes a `Seat.build` of the usual one. theirs: the workers' own name, dtype or options.
    """
    config = EngineConfig(prefill_workers=num_workers, handover_min_tokens=0, **OPTIONS | options)
    theirs = dict(theirs or {})
    path = str(shipped_checkpoint(theirs.pop("name", name)))
    dtype = theirs.pop("dtype", "float32")
    other = EngineConfig(prefill_workers=num_workers, handover_min_tokens=0, **OPTIONS | options | theirs)
    usual = partial(build_worker, path, worker_config(other), dtype, "cpu")
    block = SharedBlock(config.handover_bytes or 2**24)
    workers = PrefillWorkers(build(usual) if build else usual, num_workers, block, PrefixScore(0.3), BLOCK)
    processes = [handle.process for handle in workers.handles.values()]
    try:
        engine = build_engine(load(shipped_checkpoint(name), "float32", "cpu"), config, workers=workers)
        with LLM.for_engine(engine, Tokenizer.load(shipped_checkpoint(name))) as llm:
            yield llm
    finally:
        workers.close()
        assert not any(process.is_alive() for process in processes)


SIGNALS = {"killed": signal.SIGKILL, "stopped": getattr(signal, "SIGSTOP", None)}
