"""Course machinery. Commands that students type; shared code and the maintainers' tools are in the folders.

Modules are imported from the repository's root, `from scripts.smoke.run import …`, by scripts and tests alike. A
command in a folder is a module: `python -m scripts.traces.record`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the repository


def first_line(doc):
    """Return the first line of a module's docstring; "" without one, as under `python -OO`."""
    return (doc or "").partition("\n")[0]
