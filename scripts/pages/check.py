"""Course machinery. Checks that all generated parts of the pages are up to date, and names the commands to update them.

python -m scripts.pages.check    a few seconds; exit 1 if something is out of date
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from scripts import first_line

GENERATED = (
    *("scripts.pages.sync_code", "scripts.pages.api", "scripts.pages.draw_map", "scripts.pages.matrix"),
    *("scripts.pages.buffer_states", "scripts.pages.seen_on", "scripts.pages.on_gpu", "scripts.pages.notebook"),
    *("scripts.pages.tracks", "scripts.pages.lesson_tables", "scripts.pages.race", "scripts.pages.ladder"),
    *("scripts.pages.beyond", "scripts.pages.handover_figures", "scripts.pages.chats"),
    *("scripts.website.cards", "scripts.website.film"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run every generator with --check."""
    argparse.ArgumentParser(description=first_line(__doc__).removeprefix("Course machinery. ")).parse_args(argv)
    return max(import_module(name).main(["--check"]) for name in GENERATED)


if __name__ == "__main__":
    sys.exit(main())
