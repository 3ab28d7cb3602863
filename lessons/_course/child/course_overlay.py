"""Course machinery. In a process under `check`: imports the student's files instead of modules of `mini_engine`.

KV_COURSE_OVERLAY is a JSON object that maps module names to files. KV_COURSE_BLOCKED maps module names to the reason
why they must not be imported. Processes started by a test inherit both. A file whose import does not finish or that
leaves Python is an error at its line.
"""

import json
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

from course_deadline import Deadline, tell_and_exit

OVERLAY = "KV_COURSE_OVERLAY"
BLOCKED = "KV_COURSE_BLOCKED"
FILLED = "KV_COURSE_FILLED"
TEST_SECONDS = "KV_COURSE_TEST_SECONDS"
RUN_SECONDS = "KV_COURSE_RUN_SECONDS"  # of processor time, for the whole process


class FreshLoader(SourceFileLoader):
    """Always compiles from source: cached bytecode may be one save behind."""

    def get_code(self, fullname: str):
        source = self.get_data(self.path)
        if fullname in json.loads(os.environ.get(FILLED, "{}")):
            from course_filled import filled

            source = filled(fullname, source, self.path)
        return self.source_to_code(source, self.path)

    def exec_module(self, module) -> None:
        try:
            with Deadline(float(os.environ.get(TEST_SECONDS, "15")), tell_and_exit):
                super().exec_module(module)
        except SystemExit as error:
            why = f"the file leaves Python while it is imported: SystemExit({error})"
            raise ImportError(why).with_traceback(error.__traceback__) from None


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
    if RUN_SECONDS in os.environ:
        Deadline(float(os.environ[RUN_SECONDS]), tell_and_exit).__enter__()
    return finder


def loaded(name: str, file: str) -> bool:
    """Whether module `name` was imported from `file`."""
    module_file = getattr(sys.modules.get(name), "__file__", None)
    return module_file is not None and Path(module_file).samefile(file)
