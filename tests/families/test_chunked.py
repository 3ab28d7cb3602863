"""Course machinery. Conformance: prompts in chunks beside decodes; chunks straddle windows, checkpoints and blocks."""

import pytest

from tests.families.engines import answered, check_nothing_is_lost, engine_of, limits_of, prompts_of
from tests.families.rows import each_family

STRADDLING = {"S - 1": -1, "S": 0, "S + 1": 1}  # S: of the row, a window or what lies between two checkpoints


@each_family
@pytest.mark.parametrize("size", [1, 7, *STRADDLING])
def test_in_chunks_beside_decodes(model, size):
    size = max(1, model.straddle + STRADDLING[size]) if isinstance(size, str) else size
    engine = engine_of(model, limits_of(size, budget=max(16, size + 8)))
    prompts = prompts_of(model) if size > 1 else prompts_of(model)[:6]
    num_steps = 0

    def count():
        nonlocal num_steps
        num_steps += 1

    answered(engine, model, f"in chunks of {size}", prompts, between=count)
    assert num_steps > max(map(len, prompts)) // size, "the longest prompt took its chunks one after another"
    check_nothing_is_lost(engine)
