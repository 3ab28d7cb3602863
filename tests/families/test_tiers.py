"""Course machinery. Conformance: what the pool has lost comes back from host memory, all that goes with it included."""

import random

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
    prompts_of,
    tree_of,
    whole,
)
from tests.families.rows import each_family, each_format
from tests.support import store_of

[WHOLE] = whole([LONG])


@each_format
def test_back_from_host_memory(model):
    engine, prompts = engine_of(model, **TIERS), prompts_of(model)
    assert answered(engine, model, "cold") == [0] * len(prompts)
    for when in ("from the host", "again"):
        forget(engine)
        assert answered(engine, model, when) == whole(prompts), "up to the last whole block of each prompt"
    restored = store_of(engine).restored_tokens
    assert restored >= 2 * WHOLE
    assert answered(engine, model, "from the tree") == whole(prompts)
    assert store_of(engine).restored_tokens == restored, "the tree has it: nothing is copied"
    check_nothing_is_lost(engine)


@each_family
def test_the_tiers_go_on_where_the_tree_ends(model):
    engine = engine_of(model, **TIERS)
    answered(engine, model, "cold", [LONG])
    for when in ("tree and tiers", "once more"):
        tree_of(engine).evict(4)
        before = store_of(engine).restored_tokens
        assert answered(engine, model, when, [LONG]) == [WHOLE]
        assert 0 < store_of(engine).restored_tokens - before < WHOLE, "the tree's blocks are not copied again"
    check_nothing_is_lost(engine)


@each_family
def test_a_record_that_is_gone_shortens_what_comes_back(model):
    """Whether it was a block's, a window's or a state's: what is left of the records is of use as far as it goes."""
    engine, chance, lengths = engine_of(model, **TIERS), random.Random(0), []
    for turn in range(6):
        lengths += answered(engine, model, f"turn {turn}", [LONG])
        forget(engine)
        host = store_of(engine).tiers.host
        for key in chance.sample(list(host.records), 2):
            host.num_bytes -= host.records.pop(key).num_bytes
    assert len({*lengths, 0, WHOLE}) > 2, f"{lengths}: some requests begin in the middle"
    check_nothing_is_lost(engine)


@each_family
def test_a_preempted_request_comes_back_from_the_tiers(model):
    engine, chance = engine_of(model, limits_of(32), max_track_slots=3, **TIERS), random.Random(0)

    def preempt():
        if chance.random() < 0.4 and engine.scheduler.running:
            engine.scheduler.preempt(chance.choice(engine.scheduler.running))
            tree_of(engine).evict(100)

    answered(engine, model, "preempted", between=preempt)
    assert engine.scheduler.num_preemptions >= 3 and store_of(engine).restored_tokens
    check_nothing_is_lost(engine)


@each_family
def test_an_answer_comes_back_for_the_next_turn(model):
    """Of an answer whatever is left when it ends is saved: the last window, and states at every interval."""
    engine = engine_of(model, **TIERS)
    [request] = ask(engine, [LONG[:10]], 30)
    drain(engine)
    check(model, [request], "the first turn")
    forget(engine)
    longer = (*LONG[:10], *request.output_ids, 5)
    [found] = answered(engine, model, "the next turn", [longer])
    assert found >= 32, "behind its own answer"
    check_nothing_is_lost(engine)
