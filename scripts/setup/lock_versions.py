"""Course machinery. Writes constraints.txt: the version of every package, including transitive ones.

pyproject.toml pins the course's direct dependencies. This pins their dependencies too, for all Pythons and systems at
once, so that set-ups on different days are the same. `make lock` changes as little as possible; `make lock
ARGS=--upgrade` takes the newest versions that the pins allow.
"""

import argparse
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from scripts import ROOT, first_line
from scripts.setup_env import CONSTRAINTS, OLDEST, TORCH, dotted, venv_python

UV = "0.13.9"
HEADER = f"""# Written by `make lock` with uv {UV}, for every system and Python that the course runs on.
# CUDA's libraries are left out: each build of torch names its own.
"""
CUDA = ("nvidia-", "cuda-")


def compile_versions(python: Path, folder: Path, before: str, options: Sequence[str]) -> str:
    """Resolve pyproject.toml with uv, one line for each package; keep the versions in `before` where possible."""
    pin, out = folder / "torch.txt", folder / "out.txt"
    pin.write_text(f"torch=={TORCH}\n", encoding="utf-8")
    out.write_text(before, encoding="utf-8")
    command = [python, "-m", "uv", "pip", "compile", ROOT / "pyproject.toml", "--universal", "--quiet", *options]
    command += ["--all-extras", "--group", f"{ROOT / 'pyproject.toml'}:dev", "--python-version", dotted(OLDEST)]
    command += ["--constraints", pin, "--no-annotate", "--no-header", "--output-file", out]
    subprocess.run(command, check=True)
    return out.read_text(encoding="utf-8")


def without_cuda(text: str) -> str:
    """Drop CUDA's libraries, comments, and options such as an index from `text`."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if line[:1].isalnum() and not line.startswith(CUDA))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=first_line(__doc__).removeprefix("Course machinery. "))
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that the pins allow")
    args = parser.parse_args(argv)
    before = CONSTRAINTS.read_text(encoding="utf-8") if CONSTRAINTS.exists() else ""
    with tempfile.TemporaryDirectory() as name:  # not .venv, whose creation the old file may prevent
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = venv_python(folder / "venv")
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"uv=={UV}"], check=True)
        text = compile_versions(python, folder, before, ["--upgrade"] if args.upgrade else [])
    CONSTRAINTS.write_text(HEADER + without_cuda(text), encoding="utf-8", newline="\n")
    print(f"{CONSTRAINTS.relative_to(ROOT)}: {len(without_cuda(text).splitlines())} versions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
