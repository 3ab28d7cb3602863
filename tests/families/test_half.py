"""Course machinery. Conformance: in bfloat16, rounding may decide a token, but only between likely ones."""

import pytest
import torch

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.loading import load
from mini_engine.base.errors import UserError
from tests.families.engines import OPTIONS, ask, behind, drain, limits_of, pools_of, prompts_of
from tests.families.rows import each_kind


@each_kind
@pytest.mark.parametrize("backend", ["reference", "torch", "packed"])
def test_an_engine_runs_in_half_precision(model, backend):
    options = OPTIONS | {"kernel": "auto", "scheduler_config": limits_of()}
    try:
        engine = build_engine(load(model.path, "bfloat16", "cpu"), backend=backend, **options)
    except UserError as why:
        pytest.skip(f"NOT CHECKED: {why}")
    assert pools_of(engine)[0].K[0].dtype == torch.bfloat16
    requests = ask(engine, prompts_of(model))
    drain(engine)
    assert not any(request.error for request in requests)
    found = behind(model, [(request.prompt_ids, request.output_ids) for request in requests])
    assert found < 0.05, f"float32 finds its tokens {found:.3f} nats less likely than the best"
