"""Course machinery. Conformance: behind a part of another prompt, and behind prefixes whose state or window is gone."""

import pytest

from mini_engine.hybrid.memory import StateMemory
from mini_engine.windows.memory import WindowMemory
from tests.families.engines import (
    LONG,
    TIERS,
    answered,
    ask,
    check,
    check_nothing_is_lost,
    drain,
    engine_of,
    forget,
    limits_of,
    memories_of,
    prompt_of,
    tree_of,
    whole,
)
from tests.families.rows import BLOCK, FIRST, OTHERS, each_family, nightly, parametrized, some

[WHOLE] = whole([LONG])


def has_states(model) -> bool:
    return any(isinstance(memory, StateMemory) for memory in memories_of(engine_of(model)))


@each_family
@pytest.mark.parametrize("common", [16, 50, *(pytest.param(common, marks=nightly) for common in (3, 74))])
def test_behind_a_part_of_another_prompt(model, common):
    """It ends between two blocks or within one. Where the second prompt leaves the first, the third finds a state."""
    engine, least = engine_of(model), common // BLOCK * BLOCK
    answered(engine, model, "first", [LONG])
    for number, name in enumerate(("second", "third")):
        other = (*LONG[:common], *prompt_of(20, seed=common + number))
        [found] = answered(engine, model, name, [other])
        assert found <= least, "more than they have in common"
    assert found == least, "by then the branching point is a place to begin"
    assert answered(engine, model, "both again", [LONG, other]) == whole([LONG, other])
    check_nothing_is_lost(engine)


@each_family
def test_twins_are_computed_once(model):
    engine, twin = engine_of(model, limits_of(32)), LONG[:73]
    assert answered(engine, model, "twins", [twin] * 3) == [0, 72, 72], "they wait for the first, then share its blocks"
    check_nothing_is_lost(engine)


@each_family
def test_a_chat_finds_its_earlier_turns(model):
    engine, history = engine_of(model), ()
    for turn in range(4):
        history += prompt_of(21, seed=turn + 1)
        requests = ask(engine, [history], name=f"turn {turn}")
        drain(engine)
        [found] = check(model, requests, f"turn {turn}")
        assert turn == 0 or found >= len(history) - 21 - 12 - 2 * BLOCK, (
            "the last turn's prompt, and most of its answer"
        )
        history += tuple(requests[0].output_ids)
    check_nothing_is_lost(engine)


@each_family
@pytest.mark.parametrize("options", [{}, TIERS], ids=["tree", "tiers"])
def test_a_namespace_sees_its_own_only(model, options):
    engine, found = engine_of(model, **options), []
    for turn, namespace in enumerate(("a", "b", "a", "b", None)):
        if turn == 2 and options:
            forget(engine)
        params = ask(engine, [LONG[:1]], 1, f"params {turn}")[0].params  # of any request
        request = engine.add_request(str(turn), list(LONG), params, namespace=namespace)
        drain(engine)
        found += check(model, [request], f"namespace {namespace}")
    assert found == [0, 0, WHOLE, WHOLE, 0]
    check_nothing_is_lost(engine)


WITH_MEMORIES = ("Qwen3.5", "Qwen3 with windows", "LFM3")


@parametrized(
    some(one for one in FIRST if one.family in WITH_MEMORIES),
    some((one for one in OTHERS if one.family in WITH_MEMORIES), nightly),
)
@pytest.mark.parametrize(
    "gone", [StateMemory, WindowMemory, (StateMemory, WindowMemory)], ids=["states", "windows", "both"]
)
def test_behind_a_prefix_whose_state_or_window_is_gone(model, gone):
    """From the end on, what a memory has of the prefix is dropped place by place: the hit is what all still have."""
    engine, lengths = engine_of(model), []
    memories = [memory for memory in memories_of(engine) if isinstance(memory, gone)]
    if not memories:
        pytest.skip("this model has no such memory")
    for turn in range(6):
        lengths += answered(engine, model, f"{turn} places gone", [LONG])
        for memory in memories:
            drop(engine, memory, turn)
    assert lengths[0] == 0 < lengths[1] and len(set(lengths)) > 2, f"{lengths}: hits get shorter and come back"
    check_nothing_is_lost(engine)


def drop(engine, memory, turn):
    """Drop one place of the long prompt from a memory."""
    tree = tree_of(engine)
    if isinstance(memory, StateMemory):
        if path := [node for node in tree.path(list(LONG)) if node in memory.checkpoints]:
            memory.checkpoints.drop(path[turn % len(path)])
    else:
        blocks = tree.prefix(list(LONG[:WHOLE]))
        memory.kept.drop(blocks[-1 - 2 * turn % len(blocks)])


@each_family
@pytest.mark.parametrize("slots", [0, 8])
def test_few_checkpoints_cost_hits_and_change_no_token(model, slots):
    engine, prompts = engine_of(model, max_track_slots=slots), [LONG, prompt_of(41), prompt_of(33)]
    for when in ("cold", "warm"):
        found = answered(engine, model, when, prompts)
    assert (sum(found) == 0) == (slots == 0 and has_states(model))
    check_nothing_is_lost(engine)
