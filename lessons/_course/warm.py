"""Course machinery. Forks checks from a process that has already imported torch, so that they start at once.

Only on Linux, where forking such a process is safe; elsewhere each check starts a new process.
"""

import gc
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

from lessons._course.runner import Command, Launch, Spawned, kill_group, starting

HEAVY = [
    "torch",
    "transformers",
    "transformers.models.qwen3.modeling_qwen3",
    "pytest",
    "hypothesis",
    "safetensors.torch",
    "tokenizers",
]


class Forked:
    """A job forked from a warm process, with its own process group, environment and output files."""

    def __init__(self, command: Command) -> None:
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=run_command, args=(command,), daemon=False)
        with starting(self):
            self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        if self.process.pid is not None:
            kill_group(self.process.pid)
            self.process.kill()  # it may not lead a group yet
        self.process.join()


def warm_launch() -> Launch:
    """Return the fastest way to start repeated checks on this machine."""
    if sys.platform != "linux":
        return Spawned
    multiprocessing.get_context("forkserver").set_forkserver_preload(HEAVY)
    return Forked


def run_command(command: Command) -> None:
    """In the forked process: behave like `python *arguments`, as closely as possible."""
    gc.freeze()  # the half million objects of torch stay: no collection, and pytest makes several, looks at them again
    os.setsid()
    os.chdir(command.cwd)
    os.environ.update(command.env)
    paths = command.env["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*paths, *(entry for entry in sys.path if entry not in paths)]
    for stream, target in ((1, command.stdout), (2, command.stderr)):
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    import course_overlay

    course_overlay.install()
    if "torch" in sys.modules:  # torch read OMP_NUM_THREADS when the warm process started
        sys.modules["torch"].set_num_threads(int(command.env["OMP_NUM_THREADS"]))
    if "transformers" in sys.modules:  # and it read whether to show progress bars
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    first, *rest = command.arguments
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command.arguments)
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
