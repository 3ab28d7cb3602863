"""Course machinery. Makes .venv and installs the pinned packages, the same way on Linux, macOS and Windows.

Standard library only, and written so that an old Python can parse it too and say that a newer one is needed.
All its output goes to stderr: with `--run`, stdout belongs to the command that is run.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Callable, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # nothing is installed yet

from scripts import ROOT
from scripts.setup.steps import SetupError, Steps, say

TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST, NEWEST = (3, 11), (3, 14)  # the Python versions that this torch is built for
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"  # the version of every package, by `make lock`
ALWAYS = ("server",)  # lesson 7's smoke script and tests need it


class Machine(NamedTuple):
    """The properties of this machine that decide which torch to install."""

    system: str
    cpu: str
    has_nvidia: bool
    cpu_index_answers: Callable

    @classmethod
    def here(cls):
        has_nvidia = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()
        return cls(platform.system(), platform.machine(), has_nvidia, cpu_index_answers)


class TorchSource(NamedTuple):
    """The index to install torch from (empty: pip's default), and the reason in a few words."""

    index: str
    why: str


def check_python(version, executable=sys.executable):
    """Raise SetupError unless the pinned torch is built for this Python version."""
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return
    names = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    found = next((name for name in names if shutil.which(name)), None)
    cure = (
        f"use the installed {found}: make PYTHON={found} ..." if found else "install one, for example from python.org"
    )
    needed = f"Python {dotted(OLDEST)} to {dotted(NEWEST)}"
    raise SetupError(f"the course needs {needed}, but {executable} is {dotted(version[:2])}; {cure}.")


def dotted(version):
    return ".".join(str(part) for part in version)


def cpu_index_answers(seconds=3.0):
    """Return True if PyTorch's index of CPU builds responds within `seconds`, including name resolution."""
    import urllib.request

    answers = []

    def ask():
        try:
            with urllib.request.urlopen(CPU_INDEX + "/torch/", timeout=seconds) as reply:
                answers.append(reply.status == 200)
        except (OSError, ValueError):
            answers.append(False)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return bool(answers and answers[0])


def choose_torch(machine):
    """Return the index to install torch from. Only Linux needs a choice: its default build includes 2 GB of CUDA."""
    if machine.system == "Darwin" and machine.cpu == "x86_64":
        raise SetupError(
            f"torch {TORCH} has no build for Intel Macs; on an Apple silicon Mac, use an arm64 Python (this is x86_64)."
        )
    if machine.system == "Darwin":
        return TorchSource("", "the build for Apple silicon")
    if machine.system != "Linux":
        return TorchSource("", "the CPU build; README.md says how to get one for an NVIDIA card")
    if machine.has_nvidia:
        return TorchSource("", "the CUDA build, because there is an NVIDIA driver")
    if machine.cpu_index_answers():
        return TorchSource(CPU_INDEX, "the CPU build, because there is no NVIDIA driver")
    return TorchSource("", "the one from pip's default index, because PyTorch's CPU index does not respond")


class Marker(NamedTuple):
    """The state of the environment, stored in `.venv/course-setup.json`."""

    ready: bool  # False while packages are being installed
    ours: bool  # made by this script, which may therefore delete it
    fingerprint: str
    root: str
    extras: list

    @classmethod
    def read(cls, path):
        """Return the marker, or None if it is missing or unreadable."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path):
        """Write it atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(self._asdict()) + "\n", encoding="utf-8")
        draft.replace(path)


def fingerprint(settings, constraints):
    """Return a hash of everything that determines the installation, without ruff's or pytest's settings."""
    parts = [settings.get(table) for table in ("build-system", "project", "dependency-groups")] + [TORCH, constraints]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()


class Plan(NamedTuple):
    """The action for .venv (`create`, `recreate`, `adopt`, `update`, or nothing: `ready`), and the reason."""

    action: str
    why: str


def make_plan(marker, wanted, venv_exists, has_python):
    """Choose the action. An environment that this script did not make is installed into, but never deleted."""
    if not venv_exists:
        return Plan("create", "making .venv")
    is_whole = marker is not None and marker.ready and marker.root == wanted.root and has_python
    whole = marker if is_whole else None
    if whole is None and marker is not None and marker.ours:
        return Plan("recreate", ".venv is incomplete, or was moved here; making a new one")
    if not has_python:
        raise SetupError(".venv exists but contains no Python; remove .venv and try again.")
    if whole is None:
        return Plan("adopt", "installing into the existing .venv")
    if whole.fingerprint != wanted.fingerprint or not set(wanted.extras) <= set(whole.extras):
        return Plan("update", "the required packages have changed; updating .venv")
    return Plan("ready", ".venv is up to date")


def venv_python(venv=VENV):
    return venv / "Scripts" / "python.exe" if os.name == "nt" else venv / "bin" / "python"


def install(plan, extras, source):
    """Carry out the plan: the environment, pip, torch, everything else; then check that torch can be imported."""
    python = venv_python()
    pip = [python, "-m", "pip", "install", "--progress-bar", "raw"]
    project = f".[{','.join(extras)}]" if extras else "."
    locked = ["-c", CONSTRAINTS]
    # torch's own index may lack the locked versions of torch's dependencies; the last pip step replaces them.
    where = ["--index-url", source.index] if source.index else locked
    steps = Steps(total=5, log=VENV / "course-setup.log")
    if plan.action in ("create", "recreate"):
        steps.run("a virtual environment in .venv", [base_python(), "-m", "venv", VENV])
    else:
        steps.run("pip in .venv", [python, *(["-V"] if has_pip(python) else ["-m", "ensurepip"])])
    steps.run("a new pip", [python, "-m", "pip", "install", "--upgrade", "pip>=25.1"])
    steps.run(f"torch {TORCH}", [*pip, "torch==" + TORCH, *where])
    steps.run("the course and its tools", [*pip, "-e", project, "--group", "dev", *locked])
    steps.run("a first import of torch", [python, "-c", "import torch; torch.ones(2).sum()"])


def remove_venv(marker):
    """Delete .venv. Windows refuses while a program uses it; then it is marked incomplete, so the next run retries."""
    try:
        shutil.rmtree(str(VENV))
    except OSError as error:
        marker._replace(ready=False).write(VENV / "course-setup.json")
        raise SetupError(
            f"{error.filename} cannot be deleted ({error.strerror}); close the programs that use .venv (terminals, "
            "editors) and try again with a Python outside .venv."
        ) from None


def has_pip(python):
    return subprocess.call([str(python), "-c", "import pip"], stderr=subprocess.DEVNULL) == 0


def base_python():
    """Return the Python to make .venv with: never the one inside it, which may be about to be deleted."""
    inside = Path(sys.prefix).resolve() == VENV.resolve()
    return getattr(sys, "_base_executable", sys.executable) if inside else sys.executable


def read_settings():
    """Return pyproject.toml as a dictionary."""
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def check_extras(extras, settings):
    known = settings["project"]["optional-dependencies"]
    for name in extras:
        if name not in known:
            raise SetupError(f"there is no extra called {name!r}; the extras: {', '.join(sorted(known))}.")


def setup(extras, torch_index, machine):
    """Bring .venv to the wanted state and return the plan that was carried out. Silent if there is nothing to do."""
    check_python(sys.version_info)
    settings = read_settings()
    check_extras(extras, settings)
    marker_path = VENV / "course-setup.json"
    marker = Marker.read(marker_path)
    ours = marker.ours if marker else not VENV.exists()
    extras = sorted(set(extras) | set(marker.extras if marker else []))
    wanted = Marker(True, ours, fingerprint(settings, CONSTRAINTS.read_text(encoding="utf-8")), str(ROOT), extras)
    plan = make_plan(marker, wanted, VENV.exists(), venv_python().exists())
    if plan.action == "ready":
        return plan
    started = time.monotonic()
    say(f"Setup: {plan.why} (takes 2.5 GB of disk, several more with CUDA).")
    source = TorchSource(torch_index, "the one from " + torch_index) if torch_index else choose_torch(machine)
    say(f"       torch is {source.why}.")
    if plan.action == "recreate":
        remove_venv(marker)
    wanted._replace(ready=False).write(marker_path)
    install(plan, extras, source)
    wanted.write(marker_path)
    say(f"Setup: done in {time.monotonic() - started:.0f} s.")
    return plan


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description="Make .venv with the course's pinned packages, or bring it up to date.",
        epilog="Then use .venv/bin/python (on Windows .venv\\Scripts\\python.exe), or --run.",
    )
    parser.add_argument(
        "--extras", default="", metavar="A,B", help="extras of pyproject.toml in addition to server, such as gpu"
    )
    parser.add_argument("--torch-index", default="", metavar="URL", help="install torch from this index")
    parser.add_argument(
        "--run", nargs=argparse.REMAINDER, metavar="ARG", help="then run .venv's Python with these arguments"
    )
    return parser.parse_args(argv)


def run_python(arguments):
    """Run .venv's Python and return its exit code. Ctrl-C reaches it too, so wait for it to end."""
    child = subprocess.Popen([str(venv_python()), *arguments])
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            pass


def main(argv=None):
    args = parse_args(argv)
    extras = [*ALWAYS, *(name.strip() for name in args.extras.split(",") if name.strip())]
    try:
        plan = setup(extras, args.torch_index, Machine.here())
    except SetupError as error:
        say(f"Setup: {error}")
        return 2
    except KeyboardInterrupt:
        say("\nSetup: stopped. Run the same command again to finish.")
        return 130
    if args.run:
        return run_python(args.run)
    if plan.action == "ready":
        say(f"Setup: {plan.why}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
