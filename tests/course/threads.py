"""Course machinery. Finds out how OpenMP's threads wait in a new process: the setting before torch loads it."""

import os
import subprocess
import sys

from scripts import ROOT

WATCH = """
import os, sys
class Torch:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            print("OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Torch)
"""


def wait_policy(program: str) -> str:
    """Return OMP_WAIT_POLICY when `program` first imports torch ("None" if unset), otherwise how the program ended."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", f"{WATCH}\nsys.path.insert(0, {str(ROOT)!r})\n{program}"]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    return last.removeprefix("OMP_WAIT_POLICY ") if last.startswith("OMP_WAIT") else f"no torch: {done.stderr}"
