"""Course machinery. Layers import only from below; modules that decide need no torch; there are no import cycles.

Protects lesson N from needing lesson N + 1, the labs on the website, which have no torch, and the map of the pieces.
"""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

from scripts import ROOT
from scripts.pages.engine_modules import LAYERS, imported, read_modules

import pytest

MODULES = read_modules()
COURSE = read_modules(ROOT / "lessons")
SCRIPTS = read_modules(ROOT / "scripts")
NUMBERS_ONLY = {
    "engine.scheduler", "engine.scheduler_config", "engine.request", "engine.sampling_params", "engine.sampled",
    "assembly.engine_config", "text.detokenizer", "engine.answer", "engine.mailbox", "engine.stats", "kv.allocator",
    "kv.block_table", "kv.manager", "kv.request_table", "kv.coordinator", "kv.cache_coordinator", "kv.connector",
    "kv.memory", "kv.memories", "kv.prefixes", "kv.prefix_cache", "kv.radix", "kv.radix_node",
    "kv.eviction", "kv.refcount", "hybrid.memory", "hybrid.checkpoints", "hybrid.track_slots", "speculation.adapt",
    "speculation.options", "speculation.lookup", "speculation.speculator", "speculation.tree_lookup",
    "speculation.verify", "tiers.background", "tiers.break_even", "tiers.disk", "tiers.host", "tiers.connector",
    "tiers.companions", "tiers.keys", "tiers.records", "tiers.states", "tiers.store", "tiers.tiers", "kv.watcher",
    "agents.events", "agents.index", "agents.longest_prefix", "agents.policies", "agents.session", "agents.sessions",
    "agents.wire",
}  # fmt: skip
# Imports modules where torch cannot be found, as in the website's browser; says by way of which files one fails.
WITHOUT_TORCH = """
import importlib, sys, traceback

class NoTorch:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, NoTorch)
for name in sys.argv[1:]:
    try:
        importlib.import_module("mini_engine." + name)
    except ImportError as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        print(name, *[file for file in files if "mini_engine" in file], error, sep=" -> ")
"""
# Collects tests and says which file imported a library that takes seconds.
COLLECT_WITHOUT = """
import sys, traceback

wanted = set()

class Watch:
    def find_spec(name, path=None, target=None):
        if name in ("transformers", "openai", "matplotlib"):
            frames = traceback.extract_stack()
            wanted.add((name, next((frame.filename for frame in reversed(frames) if "tests" in frame.filename), "")))

sys.meta_path.insert(0, Watch)
import pytest
code = pytest.main(["--collect-only", "-qq", *sys.argv[1:]])
sys.exit(f"{sorted(wanted)}" if wanted or code else 0)
"""
WHAT_EACH_MAY_KNOW = {
    "model": ("model", "checkpoint.config", "base"),
    "attention": ("attention", "base"),
    "kv": ("kv", "attention", "checkpoint.config", "base"),
    "checkpoint": ("checkpoint", "model.kinds", "base"),
    "assembly.engine_config": ("engine.scheduler_config", "speculation.options", "base"),
    "tiers": ("tiers", "kv", "assembly.engine_config", "checkpoint.stored", "model.causal_lm", "base"),
}
KINDS = {"Full", "Window", "State", "Latent"}
ASK_FOR_KINDS = {
    *("checkpoint.config", "windows.window_config", "hybrid.hybrid_config", "latents.latent_config"),
    *("families.lfm3_config", "assembly.layout", "assembly.costs", "engine.engine"),
    *("windows.groups", "windows.store", "hybrid.gdn_pool"),
}


def test_a_module_imports_only_from_its_own_layer_and_those_below():
    for module in MODULES.values():
        above = {other for other in module.imports if MODULES[other].layer < module.layer}
        assert not above, f"{module.path} is in the layer '{LAYERS[module.layer].name}' and imports from above: {above}"


@pytest.mark.parametrize("place", WHAT_EACH_MAY_KNOW)
def test_a_place_knows_no_more_than_it_may(place):
    """The model never sees a store, and a store never sees the model; tiers copy blocks of pools unknown to them."""
    allowed = WHAT_EACH_MAY_KNOW[place]
    for module in MODULES.values():
        wrong = {other for other in module.imports if not any(MODULES[other].is_in(may) for may in allowed)}
        assert not (module.is_in(place) and wrong), f"{module.path} may know {', '.join(allowed)}, and imports {wrong}"


def test_only_the_layout_asks_what_layers_keep():
    """Configs say it, the layout turns it into pools and memories, and all others ask these."""
    asking = {module.name for module in MODULES.values() if KINDS & module_words(module)}
    assert {"assembly.layout"} < asking <= ASK_FOR_KINDS, (
        f"ask the pool, the store or the memory: {asking - ASK_FOR_KINDS}"
    )


def module_words(module):
    """Return the names that a module imports from `model.kinds`."""
    tree = ast.parse((ROOT / module.path).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports if node.module == "mini_engine.model.kinds" for alias in node.names}


def test_what_decides_holds_numbers_and_no_tensors():
    wrong = [MODULES[name].path for name in sorted(NUMBERS_ONLY) if "torch" in MODULES[name].foreign]
    assert not wrong, f"these import torch, if only in a function; they should hold numbers only: {wrong}"


def test_what_decides_can_be_imported_where_there_is_no_torch():
    names = [*sorted(NUMBERS_ONLY), "engine.runner"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *names], cwd=ROOT, capture_output=True, encoding="utf-8"
    )
    failed = done.stdout.splitlines()
    assert failed and failed[-1].startswith("engine.runner -> "), f"torch was not blocked: {done.stderr}"
    assert len(failed) == 1, f"these should hold numbers only, and import torch by way of: {failed[:-1]}"


def test_the_engine_does_not_know_that_there_is_http():
    web = {"fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic"}
    wrong = {
        m.path: m.foreign & web
        for m in MODULES.values()
        if m.foreign & web and not (m.is_in("server") or m.is_in("distributed.replicas"))
    }
    assert not wrong, f"only mini_engine/server and mini_engine/distributed/replicas may import these: {wrong}"


def test_the_server_does_not_know_what_is_built_on_it():
    wrong = {
        m.path: above
        for m in MODULES.values()
        if m.is_in("server") and (above := {other for other in m.imports if other.startswith(("cli.", "distributed."))})
    }
    assert not wrong, f"commands and replicas are built on lesson 7's server, not the other way round: {wrong}"


def test_the_server_s_defence_stands_behind_its_app_its_uvicorn_and_its_command():
    """A reader of lesson 7 meets it there and nowhere else."""
    wrong = {
        m.path: inside
        for name, m in MODULES.items()
        if name not in ("server.app", "server.background", "cli.serve") and not m.is_in("server.hardening")
        if (inside := {other for other in m.imports if MODULES[other].is_in("server.hardening")})
    }
    assert not wrong, f"only these three call it: {wrong}"


def circle(imports: dict[str, frozenset[str]]) -> str:
    """Return a cycle of modules that import each other, as `a → b → a`; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return " → ".join(reversed(error.args[1]))
    return ""


def test_no_two_modules_need_each_other():
    found = circle({name: module.imports for name, module in MODULES.items()})
    assert not found, f"{found}: an import in a function only hides a cycle"


def test_no_two_scripts_import_each_other():
    found = circle({name: module.imports for name, module in SCRIPTS.items()})
    assert not found, (
        f"{found}: an import inside a function only hides a cycle; move what both need into a third module"
    )


def test_an_earlier_lesson_does_not_need_a_later_one():
    """Lesson N can be loaded without lesson N + 1."""
    wrong = {
        m.path: {MODULES[other].path for other in m.needs if (MODULES[other].lesson or 0) > m.lesson}
        for m in MODULES.values()
        if m.lesson is not None
    }
    wrong = {path: later for path, later in wrong.items() if later}
    assert not wrong, f"these need modules of later lessons: {wrong}"


def test_what_puts_an_engine_together_loads_no_lesson_from_8_on():
    """Each part is imported when it is chosen: lesson 6's engine runs without lesson 8's files."""
    places = ("assembly", "families.family", "families.qwen3", "cli.arguments")
    for module in MODULES.values():
        if any(map(module.is_in, places)):
            later = {other for other in module.needs if (MODULES[other].lesson or 0) >= 8}
            assert not later, f"{module.path}: import {later} where it is chosen"


def test_the_modules_in_a_lesson_s_folder_need_no_later_one():
    """They are not the engine's: `python -m lessons` and the smoke scripts run them."""
    numbers = {f"mini_engine.{m.name}": m.lesson for m in MODULES.values()}
    numbers |= {f"lessons.{m.name}": m.lesson for m in COURSE.values()}
    for module in COURSE.values():
        if module.lesson is not None:
            known = imported(ast.walk(ast.parse((ROOT / module.path).read_text(encoding="utf-8"))))
            later = {name for name in known if (numbers.get(name) or 0) > module.lesson}
            assert not later, f"{module.path} imports modules of later lessons: {later}"


def test_the_engine_needs_nothing_of_the_course():
    wrong = {m.path for m in MODULES.values() if m.foreign & {"lessons", "scripts", "tests"}}
    assert not wrong, f"the engine is installed without lessons, scripts and tests, and these import one: {wrong}"


def test_no_missing_import_hides_another_lesson():
    """`except ImportError` is for libraries that need not be installed, never for a lesson that may not be there."""
    for module in MODULES.values():
        for node in ast.walk(ast.parse((ROOT / module.path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Try) and any(catches_import_errors(handler) for handler in node.handlers):
                names = {full.removeprefix("mini_engine.") for part in node.body for full in imported(ast.walk(part))}
                tried = names & set(MODULES) or {m for m in MODULES if any(m.startswith(f"{name}.") for name in names)}
                hidden = {MODULES[other].path for other in tried if MODULES[other].lesson != module.lesson}
                assert not hidden, f"{module.path}:{node.lineno} goes on without {hidden}"


def catches_import_errors(handler: ast.ExceptHandler) -> bool:
    return handler.type is not None and any(
        name in ast.unparse(handler.type) for name in ("ImportError", "ModuleNotFoundError")
    )


@pytest.mark.nightly
def test_collecting_a_lesson_s_tests_imports_nothing_that_takes_seconds():
    """A check that ends at the first test has collected the whole lesson."""
    lessons = [path.as_posix() for path in sorted((ROOT / "tests").glob("l*[0-9]"))]
    command = [sys.executable, "-c", COLLECT_WITHOUT, *lessons]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"import it in the function or fixture that needs it: {done.stderr[-2000:]}"
