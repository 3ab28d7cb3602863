"""Course machinery. `python -m lessons`: report in one line what is missing, otherwise run the command."""

import importlib.util
import sys
from pathlib import Path

NEEDED = ("rich",)


def complaint():
    """Return one sentence on why no command can run, or an empty string."""
    if sys.version_info < (3, 11):
        return "the course needs Python 3.11 or newer; this is {}.{}.".format(*sys.version_info[:2])
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        there = (Path(__file__).resolve().parents[1] / ".venv").is_dir()
        advice = "activate .venv first" if there else "see 'Start' in README.md"
        return "{} is not installed for {}; {}.".format(" and ".join(missing), sys.executable, advice)
    return ""


if __name__ == "__main__":
    if complaint():
        sys.exit("python -m lessons: " + complaint())
    from lessons._course.cli import main

    sys.exit(main())
