"""Course machinery. Conformance: alone, batched, and behind its own prefix, with every layer and every kernel."""

import pytest

from mini_engine.base.errors import UserError
from mini_engine.latents.contract import LatentKernel
from tests.families.engines import (
    UNCACHED,
    answered,
    ask,
    check_nothing_is_lost,
    drain,
    engine_of,
    limits_of,
    pools_of,
    prompts_of,
    whole,
)
from tests.families.rows import each_exact, each_family, each_shape, nightly
from tests.shared.compiled import needs_compiler


@each_family
def test_alone(model):
    engine = engine_of(model, **UNCACHED)
    for number, prompt in enumerate(prompts_of(model)):
        assert answered(engine, model, f"alone {number}", [prompt]) == [0]
    check_nothing_is_lost(engine)


@each_shape
def test_batched_and_then_behind_their_own_prefixes(model):
    engine, prompts = engine_of(model), prompts_of(model)
    assert answered(engine, model, "cold") == [0] * len(prompts)
    assert answered(engine, model, "warm") == whole(prompts), "a prompt that comes again begins at its last whole block"
    check_nothing_is_lost(engine)


@each_family
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=nightly) for size in (1, 16))])
def test_any_block_size(model, size):
    engine = engine_of(model, limits_of(9, 16), block_size=size, num_blocks=9600 // size, checkpoint_interval=16 * size)
    for when in ("cold", "warm"):
        found = answered(engine, model, f"{when}, blocks of {size}")
    assert found == [(len(prompt) - 1) // size * size for prompt in prompts_of(model)]
    check_nothing_is_lost(engine)


@each_exact
@pytest.mark.parametrize(
    ("backend", "kernel"),
    [
        ("torch", "auto"),
        ("packed", "auto"),
        pytest.param("reference", "cpu", marks=nightly),
        *(
            pytest.param(backend, kernel, marks=nightly)
            for backend in ("torch", "packed")
            for kernel in ("reference", "blockwise", "torch")
        ),
        pytest.param("reference", "blockwise", marks=nightly),
    ],
)
def test_every_kernel_under_all_layers(model, backend, kernel):
    try:
        engine = engine_of(model, limits_of(33), backend, kernel=kernel)
    except UserError as why:
        pytest.skip(f"NOT CHECKED: {why}")
    for when in ("cold", "warm"):
        found = answered(engine, model, when)
    assert found == whole(prompts_of(model))
    check_nothing_is_lost(engine)


@needs_compiler
@each_family
def test_packed_layers_write_to_a_direct_store_themselves(model, monkeypatch):
    engine = engine_of(model, backend="packed", kernel="auto")
    pool, _ = pools_of(engine)
    if not pool.kernel.native or isinstance(pool.kernel, LatentKernel):
        pytest.skip("NOT CHECKED: the kernel is not C++, or reads latents, which prompts may expand")
    monkeypatch.setattr(pool, "set_kv", None)
    requests = ask(engine, prompts_of(model))
    drain(engine)
    assert not any(request.error for request in requests)
