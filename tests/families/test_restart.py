"""Course machinery. Conformance: a new engine on the same directory begins with what the last one kept."""

from typing import Any

import pytest

from mini_engine.tiers.records import Kind
from tests.families.engines import (
    LONG,
    TIERS,
    answered,
    check_nothing_is_lost,
    engine_of,
    memories_of,
    prompts_of,
    whole,
)
from tests.families.rows import (
    BLOCK,
    FIRST,
    FORMATS,
    OTHERS,
    Model,
    each_family,
    each_format,
    nightly,
    parametrized,
    some,
)
from tests.support import store_of


def kept_by(model, folder, prompts=(LONG,), **options):
    """Answer prompts in an engine that ends; return it."""
    engine = engine_of(model, kv_cache_dir=folder, **TIERS | options)
    answered(engine, model, "before", prompts, between=store_of(engine).tiers.flush)  # however slow the disk is
    store_of(engine).tiers.close()
    assert store_of(engine).tiers.writer.num_dropped == 0, "the writer has room for all that goes with a step"
    return engine


@each_format
def test_a_new_engine_begins_with_what_the_last_one_kept(model, tmp_path):
    prompts = prompts_of(model)
    kept_by(model, tmp_path, prompts)
    engine = engine_of(model, kv_cache_dir=tmp_path, **TIERS)
    assert answered(engine, model, "from the disk") == whole(prompts)
    assert store_of(engine).restored_tokens >= whole([LONG])[0], "the host tier was empty"
    check_nothing_is_lost(engine)
    store_of(engine).tiers.close()


@each_family
def test_other_layers_read_the_same_records(model, tmp_path):
    kept_by(model, tmp_path)
    engine = engine_of(model, backend="torch", kv_cache_dir=tmp_path, **TIERS)
    assert answered(engine, model, "under torch's layers", [LONG]) == whole([LONG])
    store_of(engine).tiers.close()


@each_family
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_a_damaged_record_of_any_kind_is_a_miss(model, kind, tmp_path):
    first = kept_by(model, tmp_path)
    if kind.name not in {"KV"} | {
        type(memory).__name__.removesuffix("Memory").upper() for memory in memories_of(first)
    }:
        pytest.skip("this model keeps no such records")
    for path in tmp_path.glob("??/*.kv"):
        content = bytearray(path.read_bytes())
        if content[10] == kind:
            content[-100] ^= 1
            path.write_bytes(content)
    damaged = kept_by(model, tmp_path)
    assert store_of(damaged).tiers.disk.counts["damaged"] >= 1 and not store_of(damaged).restored_tokens
    if kind is Kind.KV:
        return  # those behind the first that is damaged are not looked at
    for _ in range(len(LONG) // BLOCK):  # one at a time: a request looks at no more behind the first
        engine = kept_by(model, tmp_path)
        if store_of(engine).restored_tokens == whole([LONG])[0]:
            return
    raise AssertionError("they are not written again")


def another(model: Model) -> Model:
    """Return the next shape of the same family."""
    shapes = list(model.row.shapes)
    shape = shapes[(shapes.index(model.shape) + 1) % len(shapes)]
    return Model(model.family, shape, model.row, model.kv_dtype)


@parametrized(some(FIRST), some(OTHERS, nightly))
@pytest.mark.parametrize("what", ["shape", "block size", "int4", pytest.param("int8", marks=nightly)])
def test_another_engine_s_records_are_not_found(model, what, tmp_path):
    kept_by(model, tmp_path)
    options: Any = {"block_size": 4, "num_blocks": 1200} if what == "block size" else {}
    if what in FORMATS:
        model = Model(model.family, model.shape, model.row, what)
    other = another(model) if what == "shape" else model
    engine = engine_of(other, kv_cache_dir=tmp_path, **TIERS | options)
    assert answered(engine, other, "beside another's", [LONG]) == [0]
    assert not store_of(engine).restored_tokens
    store_of(engine).tiers.close()
