"""Course machinery. Writes generated pages and pictures, or checks that they are up to date."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

WRITE = "python -m scripts.pages.check --write"


def fill(page: str, name: str, text: str) -> str:
    """Return the page with `text` between `<!-- begin: NAME -->` and `<!-- end: NAME -->`.

    Raises:
        ValueError: the page does not have these two comments, in that order.
    """
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page needs the comments {begin} and {end}")
    return f"{head}{begin}\n\n{text.strip()}\n\n{end}{tail}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Return a table whose columns are numbers, except for the first `texts`."""
    lines = [head, ["---"] * texts + ["---:"] * (len(head) - texts), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def settle(files: dict[Path, str], check: bool, command: str = WRITE) -> int:
    """Write each file whose text has changed. With `check`, only name them and return 1 if there is one."""
    old = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old:
        if check:
            print(f"{path.name} is out of date; to update it: {command}", file=sys.stderr)
        else:
            path.write_text(files[path], encoding="utf-8", newline="\n")
            print(f"wrote {path.name}")
    return 1 if check and old else 0


def asks_for_check(description: str | None, argv: list[str] | None) -> bool:
    """Parse a command line whose only option is --check."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is out of date")
    return parser.parse_args(argv).check
