"""Course machinery. Layers know only what is below them; the scheduler and the managers hold no tensors."""

from graphlib import TopologicalSorter

import pytest
from engine_modules import LAYERS, read_modules

MODULES = read_modules()
each_module = pytest.mark.parametrize("name", MODULES)
NUMBERS_ONLY = {
    "engine.scheduler", "engine.request", "engine.sampling_params", "engine.detokenizer", "engine.answer",
    "engine.mailbox", "engine.stats", "kv.manager", "kv.prefix_manager", "kv.radix", "kv.radix_node", "kv.eviction",
    "kv.refcount",
}  # fmt: skip
WHAT_EACH_MAY_KNOW = {
    "model": ("model", "config", "errors"),
    "attention": ("attention", "errors", "native_build"),
    "kv": ("kv", "attention", "config", "errors"),
}


@each_module
def test_a_module_imports_only_from_its_own_layer_and_those_below(name):
    module = MODULES[name]
    above = {other for other in module.imports if MODULES[other].layer < module.layer}
    assert not above, f"{module.path} is in the layer '{LAYERS[module.layer].name}' and imports from above: {above}"


@each_module
def test_the_model_never_sees_a_store_and_a_store_never_sees_the_model(name):
    module = MODULES[name]
    for place, allowed in WHAT_EACH_MAY_KNOW.items():
        if module.is_in(place):
            wrong = {other for other in module.imports if not any(MODULES[other].is_in(may) for may in allowed)}
            assert not wrong, f"{module.path} may know {', '.join(allowed)}, and imports {wrong}"


@pytest.mark.parametrize("name", sorted(NUMBERS_ONLY))
def test_what_decides_holds_numbers_and_no_tensors(name):
    module = MODULES[name]
    assert "torch" not in module.foreign, f"{module.path} imports torch; it should hold numbers only"


def test_the_engine_does_not_know_that_there_is_http():
    web = {"fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic"}
    wrong = {m.path: m.foreign & web for m in MODULES.values() if m.foreign & web and not m.is_in("server")}
    assert not wrong, f"only mini_engine/server may import these: {wrong}"


def test_no_two_modules_import_each_other():
    """An import inside a function only hides a circle: neither module can be read or tested without the other."""
    list(TopologicalSorter({name: module.imports for name, module in MODULES.items()}).static_order())


def test_an_earlier_lesson_does_not_need_a_later_one():
    """Lesson N can be loaded where lesson N + 1 is not there yet."""
    wrong = {
        m.path: {MODULES[other].path for other in m.needs if (MODULES[other].lesson or 0) > m.lesson}
        for m in MODULES.values()
        if m.lesson is not None
    }
    wrong = {path: later for path, later in wrong.items() if later}
    assert not wrong, f"these need modules of later lessons: {wrong}"
