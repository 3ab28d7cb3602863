"""Course machinery. Copies the website's npm files into the repository, so that pages load nothing from other hosts.

`npm ci` installs the packages of site/package.json into a temporary folder, exactly as pinned in
site/package-lock.json. The files that the pages need are copied together with their licences, and site/vendored.json
records which file is from which version. The website and its tests use only the copies; npm is needed only here.

CodeMirror comes as many small modules. esbuild, one of the packages, bundles those that site/editor/codemirror.js names
into one file; the same versions give the same bytes.

To change a version, edit site/package.json and run this with --lock.
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
EDITOR_NOTE = "/* CodeMirror and lezer, MIT licence: LICENSES.txt. Bundled by scripts/website/vendor.py. */\n"
REGISTRY = "https://registry.npmjs.org/"

# (package, patterns of the files to take, target folder)
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
        ["dist/katex.min.css", "dist/katex.min.js", "dist/fonts/*.woff2", "LICENSE"],
        ASSETS / "katex",
    ),
    ("@mermaid-js/tiny", ["dist/mermaid.tiny.js", "LICENSE"], ASSETS / "mermaid"),
    ("iframe-worker", ["shim/index.js", "LICENSE"], ASSETS / "iframe-worker"),
    ("axe-core", ["axe.min.js", "LICENSE"], FOR_TESTS / "axe"),
]
EDITOR = ASSETS / "codemirror"
IN_EDITOR = ("@codemirror/", "@lezer/", "@marijn/", "crelt", "style-mod", "w3c-keyname")
RENAMED = {  # path inside a package -> name of the copy
    "shim/index.js": "shim.js",  # mkdocs-material looks for iframe-worker/shim
}


class VendorError(RuntimeError):
    """A failure, in one sentence for the user."""


def npm(arguments: list[str], folder: Path) -> None:
    """Run npm in `folder`, without the packages' own scripts."""
    executable = shutil.which("npm")
    if executable is None:
        raise VendorError("npm is not on the PATH; install Node.js, which includes it.")
    done = subprocess.run([executable, *arguments, "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder)
    if done.returncode:
        raise VendorError(f"npm {arguments[0]} failed with exit code {done.returncode}; see its output above.")


def fetch(folder: Path, *, lock: bool) -> Path:
    """Install the packages into `folder` and return their node_modules. lock: rewrite the lock file first."""
    shutil.copy(SITE / "package.json", folder)
    if lock:
        npm(["install", "--package-lock-only"], folder)
        write_lock(folder / "package-lock.json")
    shutil.copy(SITE / "package-lock.json", folder)
    npm(["ci"], folder)
    return folder / "node_modules"


def write_lock(made: Path) -> None:
    """Write the lock file, replacing the addresses of a local mirror by those of npm's public registry."""
    locked = json.loads(made.read_text(encoding="utf-8"))
    for place, package in locked["packages"].items():
        if "resolved" in package:
            name = place.rpartition("node_modules/")[2]
            package["resolved"] = f"{REGISTRY}{name}/-/{name.rpartition('/')[2]}-{package['version']}.tgz"
    (SITE / "package-lock.json").write_text(json.dumps(locked, indent=2) + "\n", encoding="utf-8", newline="\n")


def chosen_files(modules: Path) -> dict[Path, tuple[Path, str]]:
    """Map each file that the repository should contain to its source path and its package's version."""
    chosen = {}
    for package, patterns, folder in TAKEN:
        source = modules / package
        version = json.loads((source / "package.json").read_text(encoding="utf-8"))["version"]
        for pattern in patterns:
            found = sorted(source.glob(pattern))
            if not found:
                raise VendorError(f"{package} {version} has no {pattern}; find its new name and update TAKEN.")
            for path in found:
                chosen[folder / target_name(path.relative_to(source))] = path, f"{package} {version}"
    return chosen | bundle(modules)


def bundle(modules: Path) -> dict[Path, tuple[Path, str]]:
    """Bundle CodeMirror next to `modules`, with its parts' licences. Return files like `chosen_files`."""
    script, licences = modules / "codemirror.js", modules / "LICENSES.txt"
    entry = shutil.copy(SITE / "editor" / "codemirror.js", modules.parent)  # its imports are next to it
    options = ["--bundle", "--minify", "--format=esm", "--target=es2022", f"--outfile={script}", "--log-level=warning"]
    if subprocess.run([modules / ".bin" / "esbuild", entry, *options], check=False).returncode:
        raise VendorError("esbuild could not bundle CodeMirror; see its output above.")
    script.write_text(EDITOR_NOTE + script.read_text(encoding="utf-8"), encoding="utf-8", newline="\n")
    named = sorted(path.parent for path in modules.rglob("LICENSE") if is_in_editor(path.parent, modules))
    texts = [f"{versioned(folder)}\n\n{(folder / 'LICENSE').read_text(encoding='utf-8').strip()}\n" for folder in named]
    licences.write_text(f"\n{'-' * 72}\n\n".join(texts), encoding="utf-8", newline="\n")
    packages = ", ".join(map(versioned, named))
    return {EDITOR / path.name: (path, packages) for path in (script, licences)}


def is_in_editor(folder: Path, modules: Path) -> bool:
    return folder.relative_to(modules).as_posix().startswith(IN_EDITOR)


def versioned(folder: Path) -> str:
    """Return a package's name and version."""
    about = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    return f"{about['name']} {about['version']}"


def target_name(path: Path) -> Path:
    """Return a file's target path: flat, except for fonts/, which KaTeX expects next to its style sheet."""
    if path.as_posix() in RENAMED:
        return Path(RENAMED[path.as_posix()])
    keeps_folder = path.parent.as_posix() == "dist/fonts"
    return Path(path.parent.name, path.name) if keeps_folder else Path(path.name)


def record(chosen: dict[Path, tuple[Path, str]]) -> str:
    """Return the text of site/vendored.json: every copied file with its package and its hash."""
    files = {
        target.relative_to(ROOT).as_posix(): {
            "package": package,
            "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        }
        for target, (source, package) in sorted(chosen.items())
    }
    return json.dumps(files, indent=2) + "\n"


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
    parser.add_argument("--lock", action="store_true", help="rewrite site/package-lock.json first")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy(chosen_files(fetch(Path(folder), lock=args.lock)))
    except VendorError as error:
        print(f"vendor: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
