"""Course machinery. Is this machine ready, what is missing, and what works all the same?"""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lessons._course.checker import Check, last_lines
from lessons._course.places import CHILD, Places
from lessons._course.runner import Command, Spawned, run_until

PACKAGES = {
    "torch": "needed for everything but reading",
    "transformers": "needed to compare with Hugging Face",
    "tokenizers": "needed to turn text into tokens",
    "safetensors": "needed to read the model",
    "pytest": "needed for `check`",
    "hypothesis": "needed for `check`",
}
INSTALL = "`make setup`, or the commands in README.md, installs it"
PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: state is ok, missing (something does not work) or absent (an extra that is not here)."""

    name: str
    state: str
    text: str


def examine(places: Places) -> Iterator[Finding]:
    """One finding after the other; the last is some text that the pocket model wrote."""
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    findings = [package(name, use) for name, use in PACKAGES.items()]
    yield from findings
    yield compiler()
    yield work_folder(places)
    if findings[0].state == "ok":
        yield from first_words(places)
    else:
        yield Finding("pocket model", "missing", "cannot run without torch")


def package(name: str, use: str) -> Finding:
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", f"not installed; {use}; {INSTALL}")


def compiler() -> Finding:
    """The C++ compiler that lesson 3's kernel on the CPU is built with."""
    found = which_compiler()
    if found:
        return Finding("C++ compiler", "ok", found)
    return Finding("C++ compiler", "absent", "none; the C++ kernel is left out, its tests are NOT CHECKED, all else works")
