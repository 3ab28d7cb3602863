"""Course machinery. Python runs this at startup in every process under `check`, so that all of them use the overlay."""

import atexit
import gc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_the_other_one() -> None:
    """Run the installation's own `sitecustomize`, which this file hides, if there is one."""
    others = [entry for entry in sys.path if Path(entry).resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("KV_COURSE_OVERLAY") or os.environ.get("KV_COURSE_BLOCKED"):
    import course_overlay

    course_overlay.install()
    # torch and transformers make half a million objects that stay. Searching them for cycles, again and again while
    # they are imported and once more at the end, took a third of a check's time.
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)
run_the_other_one()
