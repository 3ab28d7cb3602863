"""Course machinery. Is this machine ready, what is missing, and what works all the same?"""

import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lessons._course.checker import last_lines, python_environment
from lessons._course.places import CHILD, Places
from lessons._course.runner import Command, Spawned, run_until

PACKAGES = {
    "torch": "nothing can be run or checked; the pages, `start`, `hint` and `diff` work",
    "transformers": "nothing can be compared with Hugging Face; the engine itself runs",
    "tokenizers": "the engine takes token ids, no text",
    "safetensors": "no model can be loaded",
    "pytest": "`check` cannot run; the engine and the smoke scripts do",
    "hypothesis": "`check` cannot run; the engine and the smoke scripts do",
}
INSTALL = "`make setup`, or the commands under 'Start' in README.md, install it"
PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's. state: ok, note, absent (an extra that is not here) or missing."""

    name: str
    state: str
    text: str


def examine(places: Places) -> Iterator[Finding]:
    """One finding after the other; the last is a text that the pocket model wrote."""
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    packages = [_package(name, without) for name, without in PACKAGES.items()]
    yield from packages
    yield _work_folder(places)
    yield from _changes(places)
    if packages[0].state == "ok":
        yield from _probe(places)


def _package(name: str, without: str) -> Finding:
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", f"not installed: {without}. {INSTALL}")


def _work_folder(places: Places) -> Finding:
    """Whether files can be written where the student's go."""
    try:
        places.work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=places.work):
            return Finding("your files", "ok", f"go to {places.work}")
    except OSError as error:
        return Finding("your files", "missing", f"cannot be written to {places.work}: {error.strerror}")


def _changes(places: Places) -> Iterator[Finding]:
    """Whether the reference was edited: mostly by somebody who meant the copy in `work/`."""
    command = ["git", "diff", "--name-only", "HEAD", "--", "mini_engine", "scripts", "tests"]
    try:
        done = subprocess.run(command, cwd=places.root, capture_output=True, encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError):
        return  # no git, or no repository: nothing can be said
    names = done.stdout.split()
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"{names[0]}{more} changed here; `git diff` shows how, `git restore {names[0]}` takes it back"
        yield Finding("the reference", "note", text)


def _probe(places: Places) -> Iterator[Finding]:
    """What only a process that imports torch can tell; how it ended, if it did not get to its end."""
    with tempfile.TemporaryDirectory(prefix="lessons-", ignore_cleanup_errors=True) as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        script = str(CHILD / "first_words.py")
        job = Spawned(Command([script], python_environment(places), places.root, out, err))
        code = run_until(job, time.monotonic() + PROBE_SECONDS, lambda: None)
        for line in out.read_text(encoding="utf-8").splitlines():
            yield Finding(**json.loads(line))
        if code is None:
            yield Finding("pocket model", "missing", f"did not answer within {PROBE_SECONDS:.0f} s")
        elif code:
            yield Finding("pocket model", "missing", f"does not run: {last_lines(err, count=1)}")
