"""Course machinery. Checks that all generated parts of the pages are up to date, or writes them.

    python -m scripts.pages.check            # a few seconds; exit 1 if something is out of date
    python -m scripts.pages.check --write    # write what follows from what is kept: nothing runs or is measured

A generator is a module of this folder whose `files` returns the text that each of its files should have.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from scripts import first_line
from scripts.pages.generated import settle

GENERATORS = (
    "measured",
    *("module_tables", "matrix", "seen_on", "on_gpu", "notebook", "tracks", "lesson_tables", "stages"),
    *("race", "ladder", "beyond", "handover_figures", "agent_figures", "chats", "models", "ten_minutes"),
)
OTHERS = ("scripts.pages.sync_code", "scripts.website.cards", "scripts.website.film")  # some open a browser


def main(argv: Sequence[str] | None = None) -> int:
    """Run every generator."""
    parser = argparse.ArgumentParser(description=first_line(__doc__).removeprefix("Course machinery. "))
    parser.add_argument("--write", action="store_true", help="write what is out of date; pictures need a browser")
    args = parser.parse_args(argv)
    found = [import_module(name).main([] if args.write else ["--check"]) for name in OTHERS]
    found += [settle(import_module(f"scripts.pages.{name}").files(), not args.write) for name in GENERATORS]
    return max(found)


if __name__ == "__main__":
    sys.exit(main())
