"""Course machinery. Gives the website a Python for its labs: fetches Pyodide and pytest, and packs the course.

`python -m scripts.website.live` fetches what site/live.json pins, with npm and pip, into a folder that git ignores: in
git, each version would add 7 MB for good. Each file is compared with its pinned hash. A site built without them works;
its labs say how to get them. Every build of the site packs the course's own files again and copies the pocket model.

To change a version, edit PYODIDE, or the constraints, and run this with --pin.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from scripts import ROOT, first_line
from scripts.website.vendor import VendorError, npm

from lessons._course.catalog import read_lessons
from lessons._course.places import Places
from lessons._course.task_tests import MARK

FOLDER = ROOT / "site" / "theme" / "assets" / "live" / "vendor"
PINNED = ROOT / "site" / "live.json"
PYODIDE = "pyodide@314.0.7"
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
FOR_CHECKS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "hypothesis", "sortedcontainers")
PLATFORM = ["--python-version", "3.14", "--implementation", "cp", "--platform", "pyemscripten_2026_0_wasm32"]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
POCKET = [ROOT / "mini_engine" / "pocket" / name for name in (
    "model.safetensors", "tokenizer.json", "config.json", "generation_config.json",
)]  # fmt: skip
COURSE = [  # the repository's files that a page needs, as patterns
    "pyproject.toml", "mini_engine/**/*.py", "lessons/__init__.py", "lessons/_course/**/*.py",
    "scripts/__init__.py", "scripts/live/**/*.py", "scripts/traces/__init__.py", "scripts/traces/tape.py",
    "scripts/traces/timeline.py", "scripts/traces/sharing.py", "scripts/traces/turns.py",
    "lessons/*/lesson.toml", "lessons/l*/*.py",
]  # fmt: skip
TESTS = ["tests/*.py", "tests/shared/*.py", "tests/kernels/*.py", "tests/l*/*.py"]  # only for checks
# Pygments has 600 lexers; pytest's output needs two
LEFT_OUT = re.compile(
    r"pygments/(lexers/(?!__init__|_mapping|python|diff|special)|styles/(?!__init__|_mapping|default))"
)
MIDNIGHT = (1980, 1, 1, 0, 0, 0)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pinned() -> dict[str, str]:
    return json.loads(PINNED.read_text(encoding="utf-8"))


def is_complete() -> bool:
    """Return True if everything pinned has been fetched. Checks only names: `fetch` compares hashes."""
    return all((FOLDER / name).exists() for name in (*RUNTIME, "tools.zip"))


def download(folder: Path) -> dict[str, bytes]:
    """Return the runtime's files and the wheels, by name."""
    npm(["pack", "--silent", PYODIDE], folder)
    with tarfile.open(next(folder.glob("pyodide-*.tgz"))) as tar:
        files = {name: tar.extractfile(f"package/{name}") for name in RUNTIME}
        found = {name: file.read() for name, file in files.items() if file}
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *PLATFORM]
    done = subprocess.run([*command, "-c", str(CONSTRAINTS), "-d", str(folder), *FOR_CHECKS], check=False)
    if done.returncode:
        raise VendorError(f"pip download failed with exit code {done.returncode}; see its output above.")
    return found | {path.name: path.read_bytes() for path in sorted(folder.glob("*.whl"))}


def fetch(*, pin: bool = False) -> None:
    """Fetch all files, compare them with their pinned hashes, and write them to FOLDER. pin: write the hashes first.

    Raises:
        VendorError: npm or pip failed, or a file is not the pinned one; nothing was written.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = download(Path(folder))
    hashes = {name: digest(data) for name, data in files.items()}
    if pin:
        PINNED.write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8", newline="\n")
    if wrong := sorted(name for name in hashes.keys() | pinned().keys() if hashes.get(name) != pinned().get(name)):
        raise VendorError(f"{', '.join(wrong)}: not what site/live.json pins; if that is intended, run with --pin.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in RUNTIME:
        (FOLDER / name).write_bytes(files[name])
    write_zip(FOLDER / "tools.zip", of_wheels(data for name, data in files.items() if name.endswith(".whl")))


def of_wheels(wheels: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield the files of the wheels, licences included, without unused lexers."""
    for wheel in wheels:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            for name in archive.namelist():
                if not name.endswith("/") and not LEFT_OUT.match(name):
                    yield name, archive.read(name)


def course_files() -> list[Path]:
    """Return the repository's files that a page needs, sorted."""
    return found(COURSE)


def check_files() -> list[Path]:
    """Return what only a check needs: tests of tasks, tests that a lesson names, and files that hold none, sorted."""
    named = {ROOT / file for lesson in read_lessons(Places.find()) for file in lesson.tests}

    def is_needed(path: Path) -> bool:
        return not path.name.startswith("test_") or path in named or bool(MARK.search(text_of(path).decode("utf-8")))

    return [path for path in found(TESTS) if is_needed(path)]


def sources() -> list[Path]:
    """Return every file that the archives may be made of."""
    return [*found([*COURSE, *TESTS]), *POCKET]


def found(patterns: list[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()})


def pack() -> None:
    """Pack the course's files for the pages, if the rest is there. Writes nothing that has not changed."""
    if not is_complete():
        return
    for path in POCKET:
        write(FOLDER / "pocket" / path.name, path.read_bytes())
    for name, paths in (("course.zip", course_files()), ("tests.zip", check_files())):
        write_zip(FOLDER / name, ((path.relative_to(ROOT).as_posix(), text_of(path)) for path in paths))


def text_of(path: Path) -> bytes:
    """Return a file as git keeps it, whatever line endings this checkout has."""
    return path.read_bytes().replace(b"\r\n", b"\n")


def write_zip(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write an archive that depends only on the files."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files:
            archive.writestr(zipfile.ZipInfo(name, MIDNIGHT), data, zipfile.ZIP_DEFLATED)
    write(path, packed.getvalue())


def write(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all. An equal one is left alone: builds may run at once."""
    if not path.exists() or path.read_bytes() != data:
        new = ROOT / "build" / f"{path.name}.{os.getpid()}"
        new.parent.mkdir(exist_ok=True)
        path.parent.mkdir(exist_ok=True)
        new.write_bytes(data)
        new.replace(path)


def sizes() -> dict[str, float]:
    """Return a reader's downloads in MB: for a lab, and in addition for a check and for the model.

    `lab` is compressed, as a server sends it; `lab_unpacked` is the size that the page's own counter reaches.
    """
    parts = {
        "lab": [FOLDER / name for name in (*RUNTIME, "course.zip")],
        "check": [FOLDER / "tools.zip", FOLDER / "tests.zip"],
        "model": [FOLDER / "pocket" / path.name for path in POCKET],
    }
    compressed = {name: sum(map(sent, paths)) / 1e6 for name, paths in parts.items()}
    counted = {name: [path for path in paths if path.suffix != ".mjs"] for name, paths in parts.items()}  # not fetched
    return compressed | {f"{name}_unpacked": sum(map(size_of, paths)) / 1e6 for name, paths in counted.items()}


def size_of(path: Path) -> int:
    return path.stat().st_size


def sent(path: Path) -> int:
    """Return the number of bytes that a compressing server sends."""
    data = path.read_bytes()
    return len(data) if path.suffix == ".zip" else len(gzip.compress(data, 6))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=first_line(__doc__).removeprefix("Course machinery. "))
    parser.add_argument("--pin", action="store_true", help="fetch again and rewrite site/live.json")
    parser.add_argument("--optional", action="store_true", help="exit 0 even if nothing can be fetched")
    args = parser.parse_args(argv)
    try:
        if args.pin or not is_complete():
            fetch(pin=args.pin)
        pack()
    except (VendorError, OSError) as error:
        print(f"live: {error} The site can be built without; its labs and exercises will not run.", file=sys.stderr)
        return 0 if args.optional else 2
    print(
        "labs: {lab:.1f} MB, checks: {check:.1f} MB more, the model: {model:.1f} MB more, compressed".format(**sizes())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
