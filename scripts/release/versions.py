"""Course machinery. Checks that the package, CITATION.cff, CHANGELOG.md and a release's tag agree on the version.

`python -m scripts.release.versions v0.2.0` exits with 1 and a sentence for each difference; without a tag it compares
the three files only. Standard library only, so that it runs before anything is installed.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts import ROOT

PACKAGE = ("mini_engine/__init__.py", r'^__version__ = "([^"]+)"')
CITATION = ("CITATION.cff", r"^version: (\S+)")
CHANGELOG = ("CHANGELOG.md", r"^## (\d+\.\d+\.\S+)(?: - (\S+))?")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def found(root: Path, name: str, pattern: str) -> tuple[str | None, ...]:
    """Return the groups of the first line of a file that the pattern matches; empty if none does."""
    match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
    return match.groups() if match else ()


def differences(root: Path, tag: str = "") -> list[str]:
    """Return a sentence for each necessary change before `tag` can be published."""
    version = (*found(root, *PACKAGE), "none")[0]
    cited = (*found(root, *CITATION), "none")[0]
    logged, date = (*found(root, *CHANGELOG), None, None)[:2]
    said = []
    if cited != version:
        said.append(f"CITATION.cff says {cited}, mini_engine/__init__.py says {version}; make them equal.")
    if logged != version:
        said.append(
            f"CHANGELOG.md's first version is {logged}, the package's is {version}; add a section '## {version}'."
        )
    if tag and tag != f"v{version}":
        said.append(f"the tag is {tag}, the package's version is {version}; tag v{version}, or change the version.")
    if tag and logged == version and not DATE.fullmatch(date or ""):
        said.append(f"CHANGELOG.md's section {version} has no date; write '## {version} - YYYY-MM-DD'.")
    return said


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare the versions that the package, CITATION.cff and CHANGELOG.md say."
    )
    parser.add_argument(
        "tag", nargs="?", default="", help="also compare this tag, vX.Y.Z, and ask for the section's date"
    )
    said = differences(ROOT, parser.parse_args(argv).tag)
    print("\n".join(said) or "one version everywhere", file=sys.stderr if said else sys.stdout)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
