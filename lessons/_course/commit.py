"""Course machinery. Asks git which version of the course this is."""

import subprocess
from pathlib import Path

UNKNOWN = "unknown"
CHANGED = "+changes"
OWN_FILES = ("mini_engine", "tests", "scripts", "lessons")


def git(root: Path, *arguments: str) -> str:
    """Return git's output in `root`; empty without git or a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def changed_files(root: Path) -> list[str]:
    """Return the course's own files that differ from its commit."""
    return git(root, "diff", "--name-only", "HEAD", "--", *OWN_FILES).splitlines()


def commit_of(root: Path) -> str:
    """Return the course's commit, with "+changes" if its own files differ from it; "unknown" without a repository.

    A copy of the course without one may lie inside another repository, whose commit says nothing.
    """
    top, _, commit = git(root, "rev-parse", "--show-toplevel", "HEAD").partition("\n")
    if not commit or not root.samefile(top):
        return UNKNOWN
    return commit + (CHANGED if changed_files(root) else "")
