"""Course machinery. Conformance: decode steps padded as lesson 10 captures them. Padding touches no request."""

import pytest

from mini_engine.gpu.graphs import no_graph
from mini_engine.hybrid.memory import StateMemory
from tests.families.engines import (
    answered,
    ask,
    check,
    check_nothing_is_lost,
    drain,
    engine_of,
    memories_of,
    poison,
    pools_of,
    prompt_of,
    prompts_of,
    whole,
)
from tests.families.rows import each_exact, each_format, nightly
from tests.shared.gpu_helpers import Counting

NEW = 10


def padded(model, **options):
    """Return an engine whose decode steps are padded to one of a few sizes, and the count of its replays."""
    counting = Counting(no_graph)
    engine = engine_of(model, capture=counting, **options)
    return engine, counting


@each_format
def test_padded_steps(model):
    engine, counting = padded(model)
    prompts = prompts_of(model)
    for when in ("cold", "warm"):
        found = answered(engine, model, when)
    assert found == whole(prompts) and len(counting.replayed) > NEW, "decode steps are replayed"
    check_nothing_is_lost(engine)


@each_exact
@pytest.mark.parametrize("kernel", ["cpu", pytest.param("reference", marks=nightly)])
def test_requests_that_join_and_leave_find_their_own_rows(model, kernel):
    """A row of the buffers belongs to a long request in one step and to a short one, or to none, in the next."""
    engine, counting = padded(model, kernel=kernel)
    waiting, running, steps = [*prompts_of(model), *reversed(prompts_of(model))], [], 0
    while waiting or engine.has_unfinished:
        if waiting and steps % 2 == 0:
            running += ask(engine, [waiting.pop()], 6 + steps % 7, f"{steps}")
        engine.step()
        poison(engine, 0)
        steps += 1
    check(model, running, "joining and leaving")
    assert len(set(counting.replayed)) >= 3, "steps of several sizes were replayed"
    check_nothing_is_lost(engine)


@each_exact
def test_padding_rows_write_into_no_slot_of_a_request(model):
    """Three requests fill a size of four. What was never handed out is NaN, and stays so."""
    engine, counting = padded(model, enable_prefix_caching=False)
    requests = ask(engine, [prompt_of(length) for length in (3, 5, 6)], NEW)
    while any(len(request.output_ids) < 3 for request in requests):
        engine.step()
    pool, states = pools_of(engine)
    manager = engine.scheduler.manager
    held = {*manager.allocator.held, 0} if hasattr(manager.allocator, "held") else {0}
    others = [block for block in range(1, pool.num_blocks) if block not in held]
    assert counting.replayed and all(layer[others].isnan().all() for layer in (*pool.K, *pool.V))
    for memory in memories_of(engine):
        if isinstance(memory, StateMemory):
            mine = {slot for request in requests for slot in memory.slots_of(request.id)}
            free = [slot for slot in range(1, states.num_slots) if slot not in mine]
            assert free and states.recurrent_state[:, free].isnan().all() and states.conv_state[:, free].isnan().all()
    drain(engine)
    check(model, requests, "three rows of four")
