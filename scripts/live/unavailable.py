"""Course machinery. A pytest plugin for pages: skips a test that needs what a page does not have.

The verdict then says that it is not checked here. If the reader's own code asks for such a thing, the test fails, and
its error names the operation.
"""

import sys
import traceback
from collections.abc import Generator
from pathlib import Path

from scripts.live.small.strided import NotInThePage

import pytest


def reason_to_skip(error: BaseException, own: Path) -> str:
    """Return why a test that raised this cannot run here; empty if it failed. own: the folder of the reader's files."""
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] not in sys.modules:
        return f"needs {error.name}, which a page does not have; check it in a terminal"
    if not isinstance(error, NotInThePage):
        return ""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return "" if any(own in file.parents for file in files) else str(error)


class Unavailable:
    """The plugin. own: the folder of the reader's files."""

    def __init__(self, own: Path) -> None:
        self.own = own.resolve()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        return (yield from self.skipping())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        return (yield from self.skipping())

    def skipping(self) -> Generator[None, None, None]:
        try:
            return (yield)
        except Exception as error:
            if reason := reason_to_skip(error, self.own):
                pytest.skip(reason)
            raise
