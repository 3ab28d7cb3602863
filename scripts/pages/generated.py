"""Course machinery. Pages and pictures that a script writes: write them, or only look whether they are up to date."""

import argparse
import sys
from pathlib import Path


def fill(page: str, name: str, text: str) -> str:
    """The page with what stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->` replaced by `text`.

    Raises:
        ValueError: the page has no such two comments, in that order.
    """
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page needs the comments {begin} and {end}")
    return f"{head}{begin}\n\n{text.strip()}\n\n{end}{tail}"


def settle(files: dict[Path, str], check: bool, command: str) -> int:
    """Write each file whose text is another, or with `check` only say which; 1 if there was one."""
    old = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old:
        if check:
            print(f"{path.name} is out of date: {command}", file=sys.stderr)
        else:
            path.write_text(files[path], encoding="utf-8", newline="\n")
            print(f"wrote {path.name}")
    return 1 if check and old else 0


def asks_for_check(description: str, argv: list[str] | None) -> bool:
    """Read a command line that knows --check and nothing else."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is out of date")
    return parser.parse_args(argv).check
