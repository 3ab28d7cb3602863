"""Course machinery. Shortens what processes print, and puts lists and exit codes into words."""

import re
import signal
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

MOST_PRINTED = 500  # characters
LONG_BYTES = re.compile(r"""(?<![\w'"])b'(?!s\b)(?:[^'\\]|\\.){33,}'?|(?<![\w'"])b"(?:[^"\\]|\\.){33,}"?""")
ABSURD = re.compile(r"(?<![\w.])-?\d{13,}\.\d+")  # a figure of a division by nearly nothing, in an f-string's .1f
ADDRESS = re.compile(r"<(?:\w+\.)*(\w+) object at 0x[0-9A-Fa-f]+>")


def last_lines(*paths: Path, count: int = 12) -> str:
    """Return the last lines of a process's output."""
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace").strip() for path in paths)
    return "\n".join(text.strip().splitlines()[-count:])


def shortened(text: str, most: int = MOST_PRINTED) -> str:
    """Return `text`, or its end if it is longer than `most` characters."""
    text = text.strip()
    return text if len(text) <= most else f"… ({len(text) - most} characters left out)\n{text[-most:]}"


def value(text: str, most: int = 300) -> str:
    """Return a value's repr in short: objects by their class, the start of bytes, long text without its middle."""
    text = ABSURD.sub("far more than a million", ADDRESS.sub(r"<\1>", text))
    text = LONG_BYTES.sub(lambda found: f"{cut(found[0], 26)}…'", text)
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … {text[-half:]}"


def both(got: str, expected: str) -> tuple[str, str]:
    """Return two values in short, as `value` does; if they differ only in what it leaves out, around the difference."""
    shown = value(got), value(expected)
    if shown[0] != shown[1] or got == expected:
        return shown
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(got, expected, strict=False)))
    start = max(0, same - 8)
    return around(got, start), around(expected, start)


def around(text: str, start: int, length: int = 40) -> str:
    return f"… {text[start : start + length]}" + (" …" if start + length < len(text) else "")


def cut(text: str, most: int) -> str:
    """Return the beginning of a bytes literal without half an escape at its end."""
    return re.sub(r"\\(x[0-9a-f]?)?$", "", text[:most])


def listed(values: Iterable[object], last: str = "and") -> str:
    """Return "4", "4 and 1", "4, 1 and 0"."""
    *first, final = map(str, values)
    return f"{', '.join(first)} {last} {final}" if first else final


def exit_in_words(code: int) -> str:
    """Return "exit code 7", or the signal's name for a negative code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
