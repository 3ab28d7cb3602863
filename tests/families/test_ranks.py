"""Course machinery. Conformance: two ranks, each with its share of every layer and pool, give the tokens of one."""

import pytest

from mini_engine.base.errors import UserError
from mini_engine.distributed.tensor_parallel.shard import share_of, shared_by
from mini_engine.gpu.graphs import no_graph
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
    loaded,
    prompt_of,
    prompts_of,
    whole,
)
from tests.families.in_threads import engine_over, ranks_of
from tests.families.rows import FIRST, each_exact, each_family, each_kind, nightly, parametrized, some
from tests.l18.ranks import started
from tests.support import store_of

PATHS = {
    "chunks": {"limits": limits_of(7, 24)},
    "padded": {"capture": no_graph},
    "guesses": {"speculate": 4},
    "tiers": TIERS,
}
PROMPTS = [prompt_of(33), LONG]


@pytest.fixture
def shared(model):
    """Skip a shape that two ranks cannot share."""
    config = loaded(model).config
    try:
        share_of(config, 2, shared_by(config))
    except UserError as why:
        pytest.skip(str(why))


@each_exact
def test_two_ranks_give_the_tokens_of_one(model, shared):
    with ranks_of(model) as ranks:
        engine = engine_over(ranks, model)
        assert answered(engine, model, "cold") == [0] * len(prompts_of(model))
        assert answered(engine, model, "warm") == whole(prompts_of(model))
        check_nothing_is_lost(engine)


@each_family
@pytest.mark.parametrize("options", PATHS.values(), ids=PATHS)
def test_on_every_path(model, options, shared):
    with ranks_of(model) as ranks:
        engine = engine_over(ranks, model, **options)
        for when in ("cold", "warm"):
            found = answered(engine, model, when)
            if options is TIERS:
                forget(engine)
        assert found == whole(prompts_of(model))
        assert options is not TIERS or store_of(engine).restored_tokens, "each rank got its share of the records"
        check_nothing_is_lost(engine)


@each_kind
@pytest.mark.parametrize("backend", ["packed", pytest.param("torch", marks=nightly)])
def test_under_fast_layers(model, backend, shared):
    try:
        with ranks_of(model, backend) as ranks:
            engine = engine_over(ranks, model, limits_of(33), kernel="auto", backend=backend)
            for when in ("cold", "warm"):
                answered(engine, model, when)
    except UserError as why:
        pytest.skip(f"NOT CHECKED: {why}")


@nightly
@each_family
def test_in_a_pool_that_is_too_small(model, shared):
    prompts = [prompt_of(length) for length in (33, 40, 41, 9)]
    least = engine_of(model, limits_of(16)).scheduler.manager.most_blocks(41 + 24)
    with ranks_of(model) as ranks:
        engine = engine_over(ranks, model, limits_of(16), num_blocks=2 + least, max_track_slots=3)
        answered(engine, model, "in a small pool", prompts, 24)
        assert engine.scheduler.num_preemptions > 0
        check_nothing_is_lost(engine)


@each_family
def test_a_record_is_the_same_whatever_the_number_of_ranks(model, shared, tmp_path):
    def asked(engine, when):
        found = answered(engine, model, when, PROMPTS)
        store_of(engine).tiers.close()
        return found

    options = [TIERS | {"kv_cache_dir": tmp_path / name} for name in ("first", "second")]
    nothing, everything = [0] * len(PROMPTS), whole(PROMPTS)
    with ranks_of(model) as ranks:
        assert asked(engine_over(ranks, model, **options[0]), "two write") == nothing
        assert asked(engine_of(model, **options[0]), "one reads") == everything
        assert asked(engine_of(model, **options[1]), "one writes") == nothing
        assert asked(engine_over(ranks, model, **options[1]), "two read") == everything


@nightly
@parametrized(some(FIRST))
def test_two_processes(model, tmp_path):
    """Real ones, over one start of which all engines run."""
    with started(model.path, backend="reference") as ranks:
        disk = TIERS | {"kv_cache_dir": tmp_path}
        for options in (
            {"limits": limits_of(7, 24)},
            {"capture": no_graph},
            {"speculate": 4},
            {"num_blocks": 60},
            disk,
        ):
            engine = engine_over(ranks, model, **options)
            for when in ("cold", "warm"):
                requests = ask(engine, prompts_of(model), name=when)
                drain(engine)
                found = check(model, requests, f"{when}, {options}")
            assert found == whole(prompts_of(model)) or "num_blocks" in options
        forget(engine)
        assert answered(engine, model, "from host memory") == whole(prompts_of(model))
        store_of(engine).tiers.close()
    alone = engine_of(model, **disk)
    assert answered(alone, model, "in one process") == whole(prompts_of(model))
    store_of(alone).tiers.close()
