"""Course machinery. Conformance: agents whose turns wait while a crowd evicts, under every policy of lesson 20."""

from typing import Any

import pytest

from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.cache_coordinator import cache_of
from tests.families.engines import (
    NEW,
    TIERS,
    ask,
    check,
    check_nothing_is_lost,
    drain,
    engine_of,
    limits_of,
    prompt_of,
    tree_of,
)
from tests.families.rows import each_family, nightly

TEXTS = {"early": prompt_of(33), "late": prompt_of(41)}
PARAMS = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
TOOL = prompt_of(9)  # what a tool returns
OFF: dict[str, Any] = {"enable_sessions": False}
TLRU: dict[str, Any] = {"eviction_policy": "tlru", "tlru_threshold": 24, "tlru_next_prompt_estimate": 8}
POLICIES: dict[str, dict[str, Any]] = {"sessions": {}, "sessions, tlru": TLRU, "tlru": TLRU | OFF}
POLICIES |= {"slru": {"eviction_policy": "slru"} | OFF, "sessions, tiers": TIERS}
each_policy = pytest.mark.parametrize(
    "options",
    [pytest.param(options, id=name, marks=[] if name == "sessions" else nightly) for name, options in POLICIES.items()],
)


def small(model, times=4, **options):
    """Return an engine that has room for what two agents say, and with 4 `times` for two other requests."""
    most = engine_of(model).scheduler.manager.most_blocks(len(TEXTS["late"]) + 3 * NEW + 3 * len(TOOL))
    options = {"num_blocks": 1 + times * most, "max_track_slots": 6, "enable_sessions": True} | options
    return engine_of(model, limits_of(16, 24), **options)


def turn(engine, model, texts, when):
    """Run a turn of each agent; return its new text, and how many tokens of its prompt were found."""
    requests = [engine.add_request(f"{name}, {when}", list(ids), PARAMS, session=name) for name, ids in texts.items()]
    drain(engine)
    found = dict(zip(texts, check(model, requests, when), strict=True))
    return {name: (*one.token_ids, *TOOL) for name, one in zip(texts, requests, strict=True)}, found


def crowd(engine, model):
    """Run prompts without a session, one after the other, until the tree has lost half a pool of blocks."""
    tree, enough = tree_of(engine), engine.scheduler.manager.num_usable_blocks // 2
    for seed in range(100, 140):
        if tree.num_evicted >= enough:
            break
        requests = ask(engine, [prompt_of(40, seed)], 1, f"crowd {seed}")
        drain(engine)
        check(model, requests, "in the crowd")
    assert tree.num_evicted >= enough, "this crowd was meant to evict"


@each_family
@each_policy
def test_a_turn_behind_a_crowd(model, options):
    engine = small(model, **options)
    texts, _ = turn(engine, model, TEXTS, "first")
    texts, _ = turn(engine, model, texts, "second")  # from here on, the sessions are held
    prefixes = cache_of(engine.scheduler.manager).prefixes
    before = {name: prefixes.peek(ids, None, {}).num_tokens for name, ids in texts.items()}
    crowd(engine, model)
    _, found = turn(engine, model, texts, "third")
    if options.get("enable_sessions", True):
        assert found == before, "a session's turn must find its text"
        assert min(found.values()) > 0
    check_nothing_is_lost(engine)


@nightly
@each_family
def test_a_session_that_rewrites_its_text_and_one_that_is_closed_while_it_runs(model):
    engine = small(model)
    coordinator = engine.scheduler.manager.coordinator
    turn(engine, model, TEXTS, "first")
    rewritten = {name: (*TOOL, *ids) for name, ids in TEXTS.items()}
    requests = [engine.add_request(name, list(ids), PARAMS, session=name) for name, ids in rewritten.items()]
    while engine.scheduler.waiting:
        engine.step()
    assert coordinator.close_session("late", None) and not coordinator.close_session("late", None)
    drain(engine)
    check(model, requests, "rewritten")
    policy = tree_of(engine).policy
    assert policy.stats.num_left == 2 and [name for _, name in policy.sessions] == ["early"]
    crowd(engine, model)
    texts = {one.id: (*one.token_ids, *TOOL) for one in requests}
    _, found = turn(engine, model, texts, "behind a crowd")
    assert found["early"] > 0, "the new text is what the session waits with"
    check_nothing_is_lost(engine)


@nightly
@each_family
def test_requests_that_need_a_session_s_blocks_get_them(model):
    engine = small(model, times=2)
    texts, _ = turn(engine, model, TEXTS, "first")
    texts, _ = turn(engine, model, texts, "second")
    requests = ask(engine, [prompt_of(90, seed) for seed in range(200, 208)])
    drain(engine)
    check(model, requests, "all at once")
    assert tree_of(engine).policy.stats.evicted > 0, "it was to take blocks that a session refers to"
    turn(engine, model, texts, "third")
    check_nothing_is_lost(engine)
