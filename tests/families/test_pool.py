"""Course machinery. Conformance: `mini-engine pool` says what an engine allocates, and what a request holds there.

Protects readers who choose a GPU by these figures.
"""

import json

from scripts.pages.models import models

import pytest
import torch

from mini_engine.__main__ import main
from mini_engine.assembly.costs import Costs
from mini_engine.assembly.engine_config import EngineConfig
from tests.families.engines import LONG, OPTIONS, UNCACHED, ask, engine_of, pools_of
from tests.families.rows import BLOCK, MODELS, each_exact


def costs_of(model, kv_dtype="auto"):
    """Return an engine, and what its requests cost."""
    engine = engine_of(model, kv_dtype=kv_dtype, **UNCACHED)
    return engine, Costs(engine.config, torch.float32, EngineConfig(block_size=BLOCK, kv_dtype=kv_dtype))


@each_exact
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_the_pools_of_an_engine_have_these_bytes(model, kv_dtype):
    engine, costs = costs_of(model, kv_dtype)
    kv, states = pools_of(engine)
    assert kv.bytes == OPTIONS["num_blocks"] * costs.block_bytes
    assert (states.mem_bytes if states else 0) == costs.state_bytes * (states.num_slots if states else 0)


@each_exact
def test_a_request_holds_these_bytes_after_each_step(model):
    engine, costs = costs_of(model)
    [request] = ask(engine, [LONG], 2 * BLOCK)
    held = engine.scheduler.manager.allocator.held
    engine.step()
    while not request.is_finished:
        engine.step()
        if not request.is_finished:
            num_tokens = len(LONG) + len(request.output_ids) - 1  # the last one has no K and V yet
            got = len(held) * costs.block_bytes + costs.state_bytes
            assert got == costs.request_bytes(num_tokens), f"{num_tokens} tokens"
    assert len(request.output_ids) == 2 * BLOCK


@each_exact
def test_the_command_says_it_without_the_weights(model, tmp_path, capsys):
    engine, costs = costs_of(model)
    (tmp_path / "config.json").write_bytes((model.path / "config.json").read_bytes())
    beside = costs.block_bytes + costs.state_bytes  # the null block, and the padding slot
    memory = beside + 3 * costs.request_bytes(75)
    options = ["--json", "--dtype", "float32", "--tokens", "75", "--block-size", str(BLOCK), "--memory"]
    for size, at_once in ((memory, 3), (memory - 1, 2), (beside, 0), (0, 0)):
        assert main(["pool", str(tmp_path / "config.json"), *options, str(size)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["requests"] == [{"tokens": 75, "bytes": costs.request_bytes(75), "at_once": at_once}]
    assert found["runs"] and found["weight_bytes"] == 4 * sum(one.numel() for one in engine.runner.model.parameters())


def test_each_published_model_that_is_marked_as_run_has_a_row():
    types = {json.loads((one[0].path / "config.json").read_text(encoding="utf-8"))["model_type"] for one in MODELS}
    marked = {model.config["model_type"] for model in models() if model.runs}
    assert marked and marked <= types, "the page says of these that tiny models ran"
