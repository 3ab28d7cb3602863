"""Lesson 18. Whatever raises in a clean-up, for every kind of model: every request ends, and what it held is returned.

The model's processes are not here: what they raise is. `test_parallel_ends.py` kills one.
"""

from functools import cache

import pytest

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.llm import LLM
from mini_engine.assembly.loading import load
from mini_engine.base.errors import EngineDead
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.connector import KvConnector
from mini_engine.kv.memory import NO_MEMORY
from mini_engine.kv.request_table import RequestTable
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.reference, pytest.mark.ci]  # about the engine, not about a task
FAMILIES = ("pocket", "pocket-hybrid", "pocket-windows", "pocket-latent")
PROMPTS = [[5, 9, 11, 30] * 3, [7, 8, 9] * 5, list(range(100, 118))]
CHOSEN = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
WAYS = ("a failed step", "abort", "the end of an answer", "preemption", "close")

# where it raises; False: nothing is lost, so the engine goes on
EVERYWHERE = {
    "connector.request_finished": False,
    "connector.save_kv": False,
    "tree.insert": True,
    "tree.unlock": True,
    "prefixes.release": True,
    "table.free": True,
}
PLACES = {
    "pocket": EVERYWHERE,
    "pocket-hybrid": EVERYWHERE | {"memory.free": True, "states.reset_states": True},
    "pocket-windows": EVERYWHERE | {"memory.free": True, "kept.keep": True},
    "pocket-latent": EVERYWHERE,
}
HARMLESS = {("tree.insert", "a failed step")}  # after an error nothing is stored
LEAKS = {"tree.unlock", "prefixes.release", "table.free", "memory.free"}  # what itself fails cannot return its blocks
CASES = [(family, place) for family in FAMILIES for place in PLACES[family]]
everywhere = pytest.mark.parametrize(("family", "place"), CASES)


@cache
def model_of(family):
    return load(POCKET_DIR if family == "pocket" else family, "auto", "cpu")


@cache
def tokenizer():
    return Tokenizer(POCKET_DIR)


def engine_of(family):
    """Return an engine in which two of three requests run at once, and hybrids have checkpoints."""
    limits = SchedulerConfig(max_num_seqs=2)
    options = {"checkpoint_interval": 24} if family == "pocket-hybrid" else {}
    return build_engine(
        model_of(family), num_blocks=256, block_size=4, backend="reference", scheduler_config=limits, **options
    )


@cache
def expected(family):
    """Return the answer to the last prompt."""
    return answer(engine_of(family)).output_ids


def answer(engine):
    request = engine.add_request("later", PROMPTS[-1], CHOSEN)
    while engine.has_unfinished:
        engine.step()
    return request


def on_fire(*_, **__):
    raise ValueError("the books are on fire")


def rank_is_gone(*_, **__):
    raise EngineDead("rank 1 of 2 has ended (killed by SIGKILL); start it again")


def break_at(place, manager, monkeypatch):
    """Let whatever is at this place raise from now on."""
    memory = manager.coordinator.memory
    owner, _, name = place.partition(".")
    if owner == "connector":
        connector = KvConnector()
        monkeypatch.setattr(connector, name, on_fire)
        monkeypatch.setattr(manager.coordinator, "connector", connector)
    elif place == "states.reset_states":
        monkeypatch.setattr(memory.states, name, rank_is_gone)
    else:
        at = {
            "tree": manager.coordinator.prefixes.tree,
            "prefixes": manager.coordinator.prefixes,
            "table": RequestTable,
            "memory": memory,
        }
        monkeypatch.setattr(memory.kept if owner == "kept" else at[owner], name, on_fire)


def begin(engine):
    """Return three requests: two that decode, and one that waits."""
    requests = [engine.add_request(str(i), ids, CHOSEN) for i, ids in enumerate(PROMPTS)]
    while not all(request.output_ids for request in requests[:2]):
        engine.step()
    assert engine.scheduler.running == requests[:2] and engine.scheduler.waiting == requests[2:]
    return requests


def step_to_the_end(engine):
    try:
        while engine.has_unfinished:
            engine.step()
    except EngineDead as error:
        assert str(error) == engine.fault


def end(engine, way, monkeypatch):
    """End all requests."""
    if way == "a failed step":
        monkeypatch.setattr(engine.runner, "run", on_fire)
    if way == "abort":
        for request_id in list(engine.scheduler.requests):
            assert engine.abort(request_id)
    elif way == "preemption":
        try:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        except EngineDead as error:
            assert str(error) == engine.fault
    if way == "close":
        LLM.for_engine(engine, tokenizer()).close()
    else:
        step_to_the_end(engine)


def check_nothing_is_held(manager, place):
    assert not manager.tables
    memory = manager.coordinator.memory
    if memory is not NO_MEMORY:
        assert not memory.holds or place == "memory.free"
        if hasattr(memory, "free_slots") and place != "memory.free":
            assert sorted(memory.free_slots) == list(range(1, memory.states.max_reqs + 1))
    if place not in LEAKS:
        assert manager.blocks_by_state.held == 0


@pytest.mark.parametrize("way", WAYS)
@everywhere
def test_every_request_ends_and_the_engine_goes_on_or_says_why_not(family, place, way, monkeypatch):
    engine = engine_of(family)
    manager = engine.scheduler.manager
    requests = begin(engine)
    with monkeypatch.context() as patch:
        break_at(place, manager, patch)
        end(engine, way, patch)
    assert all(request.is_finished for request in requests) and not engine.scheduler.requests
    assert not engine.scheduler.running and not engine.scheduler.waiting
    check_nothing_is_held(manager, place)
    if engine.fault:
        assert PLACES[family][place] and ("on fire" in engine.fault or "rank 1 of 2" in engine.fault)
        late = engine.add_request("late", PROMPTS[0], CHOSEN)
        with pytest.raises(EngineDead) as caught:
            engine.step()
        assert str(caught.value) == engine.fault and engine.fault in late.error
    else:
        assert not PLACES[family][place] or (place, way) in HARMLESS
        assert answer(engine).output_ids == expected(family)
    LLM.for_engine(engine, tokenizer()).close()


BEGINNINGS = [*((family, "tree.match") for family in FAMILIES), ("pocket-hybrid", "states.reset_states")]


@pytest.mark.parametrize(("family", "place"), [*BEGINNINGS, ("pocket-windows", "kept.use")])
def test_a_request_that_fails_while_it_is_admitted_leaves_nothing_behind(family, place, monkeypatch):
    engine = engine_of(family)
    manager, request = engine.scheduler.manager, engine.add_request("0", PROMPTS[0], CHOSEN)
    with monkeypatch.context() as patch:
        break_at(place, manager, patch)
        with pytest.raises(EngineDead if place == "states.reset_states" else ValueError):
            engine.step()
        engine.abort("0")
    assert request.is_finished and not engine.has_unfinished
    check_nothing_is_held(manager, place)
    assert bool(engine.fault) == (place == "states.reset_states"), "a rank is gone, for good"
    if not engine.fault:
        assert answer(engine).output_ids == expected(family)
