"""Course machinery. Brings what the website takes from npm into the repository, so that a page asks nobody else.

`npm ci` fetches the packages of site/package.json into a temporary folder, exactly as site/package-lock.json pins them.
What the pages need is copied beside its licence, and site/vendored.json says which file is from which version. The
website and its tests use the copies alone: npm is needed only here.

To move a version, change it in site/package.json and run this with --lock.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts import ROOT, first_line

SITE = ROOT / "site"
ASSETS = SITE / "theme" / "assets" / "vendor"
FOR_TESTS = ROOT / "tests" / "course" / "vendor"
RECORD = SITE / "vendored.json"
REGISTRY = "https://registry.npmjs.org/"

# (package, what to take from it: patterns, the folder it goes to)
TAKEN = [
    (
        "@fontsource-variable/ibm-plex-sans",
        ["files/ibm-plex-sans-latin-wght-normal.woff2", "files/ibm-plex-sans-latin-wght-italic.woff2", "LICENSE"],
        ASSETS / "plex-sans",
    ),
    (
        "@ibm/plex-mono",
        [
            "fonts/split/woff2/IBMPlexMono-Regular-Latin1.woff2",
            "fonts/split/woff2/IBMPlexMono-Regular-Pi.woff2",  # arrows and the lines of drawn boxes
            "fonts/split/woff2/IBMPlexMono-SemiBold-Latin1.woff2",
            "LICENSE.txt",
        ],
        ASSETS / "plex-mono",
    ),
    (
        "katex",
        ["dist/katex.min.css", "dist/katex.min.js", "dist/contrib/auto-render.min.js", "dist/fonts/*.woff2", "LICENSE"],
        ASSETS / "katex",
    ),
    ("@mermaid-js/tiny", ["dist/mermaid.tiny.js", "LICENSE"], ASSETS / "mermaid"),
    ("iframe-worker", ["shim/index.js", "LICENSE"], ASSETS / "iframe-worker"),
    ("axe-core", ["axe.min.js", "LICENSE"], FOR_TESTS / "axe"),
]
RENAMED = {  # a path inside a package -> its name beside the others
    "shim/index.js": "shim.js",  # mkdocs-material looks for iframe-worker/shim
}


class VendorError(RuntimeError):
    """What went wrong, in one sentence for the person who ran this."""


def npm(arguments: list[str], folder: Path) -> None:
    """Run npm in `folder`; no package's own script is ever run."""
    executable = shutil.which("npm")
    if executable is None:
        raise VendorError("npm is not on the PATH; install Node.js, which brings it.")
    done = subprocess.run([executable, *arguments, "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder)
    if done.returncode:
        raise VendorError(f"npm {arguments[0]} ended with exit code {done.returncode}; see what it says above.")


def fetch(folder: Path, *, lock: bool) -> Path:
    """Put the packages into `folder` and return their node_modules. lock: make the lock file anew first."""
    shutil.copy(SITE / "package.json", folder)
    if lock:
        npm(["install", "--package-lock-only"], folder)
        write_lock(folder / "package-lock.json")
    shutil.copy(SITE / "package-lock.json", folder)
    npm(["ci"], folder)
    return folder / "node_modules"


def write_lock(made: Path) -> None:
    """Keep the lock file, with the address that everybody's npm knows in place of the one it was fetched from."""
    locked = json.loads(made.read_text(encoding="utf-8"))
    for place, package in locked["packages"].items():
        if "resolved" in package:
            name = place.rpartition("node_modules/")[2]
            package["resolved"] = f"{REGISTRY}{name}/-/{name.rpartition('/')[2]}-{package['version']}.tgz"
    (SITE / "package-lock.json").write_text(json.dumps(locked, indent=2) + "\n", encoding="utf-8", newline="\n")


def chosen_files(modules: Path) -> dict[Path, tuple[Path, str]]:
    """For each file that the repository should hold: where it comes from, and from which version of what."""
    chosen = {}
    for package, patterns, folder in TAKEN:
        source = modules / package
        version = json.loads((source / "package.json").read_text(encoding="utf-8"))["version"]
        for pattern in patterns:
            found = sorted(source.glob(pattern))
            if not found:
                raise VendorError(f"{package} {version} has no {pattern}; see what it is called now and mend TAKEN.")
            for path in found:
                chosen[folder / target_name(path.relative_to(source))] = path, f"{package} {version}"
    return chosen


def target_name(path: Path) -> Path:
    """KaTeX's styles look for fonts/ and its scripts for contrib/ beside them; everything else lies flat."""
    if path.as_posix() in RENAMED:
        return Path(RENAMED[path.as_posix()])
    keeps_folder = path.parent.as_posix() in {"dist/fonts", "dist/contrib"}
    return Path(path.parent.name, path.name) if keeps_folder else Path(path.name)


def record(chosen: dict[Path, tuple[Path, str]]) -> str:
    """The text of site/vendored.json: every copied file, its package, the hash of its bytes."""
    files = {
        target.relative_to(ROOT).as_posix(): {
            "package": package,
            "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        }
        for target, (source, package) in sorted(chosen.items())
    }
    return json.dumps(files, indent=2) + "\n"


def differences(chosen: dict[Path, tuple[Path, str]]) -> list[str]:
    """What the repository holds that the packages do not, or otherwise."""
    said = []
    for target, (source, package) in chosen.items():
        name = target.relative_to(ROOT).as_posix()
        if not target.exists():
            said.append(f"{name} is missing ({package})")
        elif target.read_bytes() != source.read_bytes():
            said.append(f"{name} is not that of {package}")
    there = {path for folder in (ASSETS, FOR_TESTS) for path in folder.rglob("*") if path.is_file()}
    said += [f"{path.relative_to(ROOT).as_posix()} is from no package" for path in sorted(there - set(chosen))]
    if not RECORD.exists() or RECORD.read_text(encoding="utf-8") != record(chosen):
        said.append("site/vendored.json is out of date")
    return said


def copy(chosen: dict[Path, tuple[Path, str]]) -> None:
    for folder in (ASSETS, FOR_TESTS):
        shutil.rmtree(folder, ignore_errors=True)
    for target, (source, _) in chosen.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    RECORD.write_text(record(chosen), encoding="utf-8", newline="\n")
    size = sum(path.stat().st_size for path in chosen)
    print(f"{len(chosen)} files, {size / 1e6:.1f} MB, from {len(TAKEN)} packages")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=first_line(__doc__).removeprefix("Course machinery. "))
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the copies are not npm's")
    parser.add_argument("--lock", action="store_true", help="make site/package-lock.json anew first")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            chosen = chosen_files(fetch(Path(folder), lock=args.lock and not args.check))
            if not args.check:
                copy(chosen)
                return 0
            said = differences(chosen)
    except VendorError as error:
        print(f"vendor: {error}", file=sys.stderr)
        return 2
    print("\n".join(said) or f"{len(chosen)} files are as their packages have them")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
