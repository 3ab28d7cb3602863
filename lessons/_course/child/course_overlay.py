"""Course machinery. In a process under `check`: imports the student's files instead of modules of `mini_engine`.

KV_COURSE_OVERLAY is a JSON object that maps module names to files. KV_COURSE_BLOCKED maps module names to the reason
why they must not be imported. Processes started by a test inherit both.
"""

import json
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

OVERLAY = "KV_COURSE_OVERLAY"
BLOCKED = "KV_COURSE_BLOCKED"


class FreshLoader(SourceFileLoader):
    """Always compiles from source: cached bytecode may be one save behind."""

    def get_code(self, fullname: str):
        return self.source_to_code(self.get_data(self.path), self.path)


class OverlayFinder:
    """A meta-path finder for the overlaid and the blocked modules only."""

    def __init__(self, overlay: dict[str, str], blocked: dict[str, str]) -> None:
        self.overlay = overlay
        self.blocked = blocked

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        if fullname in self.blocked:
            raise ModuleNotFoundError(f"{fullname} cannot be imported here: {self.blocked[fullname]}", name=fullname)
        file = self.overlay.get(fullname)
        return spec_from_file_location(fullname, file, loader=FreshLoader(fullname, file)) if file else None


def install() -> OverlayFinder:
    """Install the finder that the environment describes. Call this before `mini_engine` is imported."""
    finder = OverlayFinder(json.loads(os.environ.get(OVERLAY, "{}")), json.loads(os.environ.get(BLOCKED, "{}")))
    sys.meta_path.insert(0, finder)
    return finder


def loaded(name: str, file: str) -> bool:
    """Whether module `name` was imported from `file`."""
    module_file = getattr(sys.modules.get(name), "__file__", None)
    return module_file is not None and Path(module_file).samefile(file)
