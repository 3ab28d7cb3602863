"""Course machinery. Writes the tables of the engine's modules into how-the-pieces-fit.md, from the source itself.

Lessons and descriptions come from the modules' docstrings, layers from `engine_modules.LAYERS`.
"""

from itertools import groupby
from pathlib import Path

from scripts import ROOT
from scripts.pages.engine_modules import LAYERS, Module, read_modules
from scripts.pages.generated import fill

PAGE = ROOT / "lessons" / "how-the-pieces-fit.md"


def layer_table() -> str:
    """Return the table of all layers: name, purpose, where its modules are."""
    rows = ["| layer | what it does | where |", "| --- | --- | --- |"]
    for layer in LAYERS:
        rows.append(f"| {layer.name} | {layer.says} | {', '.join(map(place_shown, layer.places))} |")
    return "\n".join(rows)


def place_shown(place: str) -> str:
    """Return the path of a package, with a trailing slash, or of a module."""
    path = place.replace(".", "/")
    return f"`{path}/`" if (ROOT / "mini_engine" / path).is_dir() else f"`{path}`"


def package_of(module: Module) -> str:
    """Return the folder of a module below mini_engine/, such as `kv/`; empty for one that is in none."""
    return module.name.replace(".", "/").rpartition("/")[0].partition("/")[0] + "/" if "." in module.name else ""


def module_tables(modules: dict[str, Module]) -> str:
    """Return a folded table for each package: module, lesson, first docstring sentence."""
    lessons = {int(path.name[1 : path.name.index("_")]): path.name for path in (ROOT / "lessons").glob("l[0-9]*_*")}
    ordered = sorted(modules.values(), key=lambda module: (package_of(module), module.name))
    parts = []
    for package, found in groupby(ordered, package_of):
        inside = list(found)
        numbers = sorted({module.lesson for module in inside if module.lesson is not None})
        rows = ["| module | lesson | what it is |", "| --- | --- | --- |"]
        for module in inside:
            link = "" if module.lesson is None else f"[{module.lesson}]({lessons[module.lesson]}/README.md)"
            path = module.name.replace(".", "/").removeprefix(package)
            rows.append(f"| [`{path}`](../{module.path}) | {link} | {module.line} |")
        parts.append(folded(summary(package, len(inside), numbers), "\n".join(rows)))
    return "\n\n".join(parts)


def summary(package: str, count: int, lessons: list[int]) -> str:
    """Return "kv/: 33 modules, lessons 1, 2, 3"."""
    name = f"<code>{package or 'mini_engine/'}</code>"
    taught = f", lesson{'s' * (len(lessons) > 1)} {', '.join(map(str, lessons))}" if lessons else ""
    return f"{name}: {count} module{'s' * (count > 1)}{taught}"


def folded(head: str, table: str) -> str:
    return f'<details markdown="1"><summary>{head}</summary>\n\n{table}\n\n</details>'


def files() -> dict[Path, str]:
    """Return the contents that the page should have."""
    modules = read_modules()
    page = PAGE.read_text(encoding="utf-8")
    page = fill(page, "count", f"The engine consists of {len(modules)} modules, a file each.")
    page = fill(page, "layers", layer_table())
    page = fill(page, "modules", module_tables(modules))
    return {PAGE: page}
