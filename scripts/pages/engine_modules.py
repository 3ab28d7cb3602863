"""Course machinery. Reads the engine's modules: their lesson, their first docstring sentence, and their imports.

Everything is read from the syntax tree, without torch. `LAYERS` is the order in which modules may import each other;
tests/course/test_layers.py enforces it. Other packages, such as `scripts`, can be read too.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts import ROOT

PACKAGE = "mini_engine"
FIRST_LINE = re.compile(r"(?:Lesson (?P<lesson>\d+)|Course machinery)\. (?P<line>.*)", re.DOTALL)


@dataclass(frozen=True)
class Layer:
    """A layer of modules. places: packages and modules, named relative to mini_engine; the longest match wins."""

    name: str
    says: str
    places: tuple[str, ...]


LAYERS = (
    Layer(
        "Interfaces",
        "the interfaces for people and programs",
        ("server", "distributed", "cli", "__main__"),
    ),
    Layer(
        "The engine",
        "takes requests, runs steps, returns answers",
        (
            "assembly",
            "engine.offline",
            "engine.jobs",
            "engine.worker",
            "engine.mailbox",
            "engine.burst",
            "engine.open_answer",
            "engine.turns",
            "engine.engine",
            "tiers.opening",
            *("handover.opening", "handover.prefill", "handover.handle", "handover.workers", "distributed.restart"),
        ),
    ),
    Layer(
        "Inside a step",
        "which requests run, how the step is planned, which token is chosen, which text is shown",
        (
            "agents",
            "engine",
            "gpu",
            "grammars",
            "handover",
            "hybrid",
            *("assembly.layout", "assembly.storage", "assembly.pools", "agents.longest_prefix"),
            "distributed.tensor_parallel",
            "speculation",
            "windows.plan",
        ),
    ),
    Layer(
        "KV and attention",
        "where K and V are stored, and how they are read",
        (
            *("kv", "attention", "layers", "experts", "families", "tiers", "quantized", "distributed.routing"),
            "agents",
            *("hybrid.memory", "hybrid.checkpoints", "hybrid.track_slots", "hybrid.gdn_pool", "hybrid.store"),
            *("hybrid.delta_rule", "hybrid.native", "hybrid.packed_mixers", "hybrid.fast"),
            "windows",
            "latents",
        ),
    ),
    Layer(
        "The model",
        "the network, its files and its text, independent of any lesson",
        (
            *("model", "checkpoint", "text", "pocket", "pocket_hybrid", "pocket_windows", "pocket_latent"),
            *("hybrid.model", "hybrid.short_conv", "latents.model"),
            *("experts.grouping", "experts.router", "experts.experts", "experts.feed_forward"),
        ),
    ),
    Layer(
        "Foundations",
        "definitions that all layers may use",
        (
            "checkpoint.config",
            "checkpoint.config_schema",
            "checkpoint.generation",
            "checkpoint.json_files",
            "model.kinds",
            "base",
            *("assembly.engine_config", "engine.scheduler_config", "speculation.options"),
            "text.prompts",
            "cli.parser",
            "hybrid.hybrid_config",
            "windows.window_config",
            "latents.latent_config",
            "experts.config",
        ),
    ),
)


@dataclass(frozen=True)
class Module:
    """One file of the package.

    name: relative to the package, such as `kv.radix`. lesson: its number, None for the course's machinery.
    line: the first sentence of its docstring. imports: the package's modules that it imports anywhere in the file.
    needs: those imported at its top level. foreign: other packages that it imports.
    """

    name: str
    path: str
    lesson: int | None
    line: str
    imports: frozenset[str]
    needs: frozenset[str]
    foreign: frozenset[str]

    @property
    def layer(self) -> int:
        """The index of its layer in LAYERS, from the top."""
        places = [(place, index) for index, layer in enumerate(LAYERS) for place in layer.places]
        fits = [(len(place), index) for place, index in places if self.is_in(place)]
        if not fits:
            raise LookupError(f"{self.path} belongs to no layer; add it to LAYERS in scripts/pages/engine_modules.py")
        return max(fits)[1]

    def is_in(self, place: str) -> bool:
        """Return True if `place` is this module or a package that contains it."""
        return self.name == place or self.name.startswith(place + ".")


def read_modules(package: Path = ROOT / PACKAGE) -> dict[str, Module]:
    """Return the modules of a package by name, without the packages' own `__init__` files.

    A file that shares its name with a folder (bench.py, bench/) is read, but importing that name means the folder.
    """
    paths = {
        ".".join(path.relative_to(package).with_suffix("").parts): path
        for path in sorted(package.rglob("*.py"))
        if path.name != "__init__.py" or path.parent.name.startswith("pocket")
    }
    names = {name.removesuffix(".__init__") for name, path in paths.items() if not path.with_suffix("").is_dir()}
    return {
        name.removesuffix(".__init__"): _read(name.removesuffix(".__init__"), path, names, package)
        for name, path in paths.items()
    }


def _read(name: str, path: Path, names: set[str], package: Path) -> Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    match = FIRST_LINE.match(ast.get_docstring(tree) or "")
    said = " ".join(match["line"].split("\n\n")[0].split()) if match else ""
    lesson = int(match["lesson"]) if match and match["lesson"] else None
    known = imported(ast.walk(tree))
    foreign = {full.split(".")[0] for full in known} - {package.name}
    ours, needs = (
        {full.removeprefix(package.name + ".") for full in part} & names - {name}
        for part in (known, imported(tree.body))
    )
    place = path.relative_to(package.parent).as_posix()
    return Module(name, place, lesson, said, frozenset(ours), frozenset(needs), frozenset(foreign))


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the full names that these statements import: `from a.b import c` gives `a.b` and `a.b.c`."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found
