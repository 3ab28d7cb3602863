"""Course machinery. `python -m lessons`: says what is missing in one line, else hands over to the commands."""

import importlib.util
import sys

NEEDED = ("typer", "rich")


def complaint():
    """What stops the commands from running at all, as one sentence; empty if nothing does."""
    if sys.version_info < (3, 11):
        return "Python 3.11 or newer is needed; this is {}.{}.".format(*sys.version_info[:2])
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return "{} not installed in {}: see 'Start' in README.md, then try again.".format(
            " and ".join(missing), sys.executable
        )
    return ""


if __name__ == "__main__":
    if complaint():
        sys.exit("python -m lessons: " + complaint())
    from lessons._course.cli import main

    main()
