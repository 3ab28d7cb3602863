"""Lesson 0. The errors that callers may want to catch, and warnings; each message is one sentence."""

import functools
import sys
from importlib import import_module
from types import ModuleType


class UserError(ValueError):
    """The user's input cannot be used. Commands print the message and exit with 2.

    param: the name of the offending parameter, if there is one; lesson 7's server reports it.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooLong(UserError):
    """A prompt and its answer together are longer than the model or the whole pool can take."""


class EngineDead(UserError):
    """No step can run any more, for any request: a process of the model has ended, or memory was lost."""


class CacheFull(RuntimeError):
    """A contiguous cache has fewer rows than the sequence has tokens (Lesson 1). Nothing was changed."""


class OutOfBlocks(RuntimeError):
    """A pool has fewer free blocks than were requested (Lesson 2). Nothing was changed."""


def needing(module: str, advice: str) -> ModuleType:
    """Return a module of ours, imported. UserError, with this advice, if a library that it needs is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mini_engine"):
            raise
        raise UserError(f"{advice} ({error.name} is missing)") from None


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, to quote within a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@functools.cache
def warn_once(message: str) -> None:
    """Print the message as one line on stderr, the first time it is given."""
    sys.stderr.write(f"warning: {message}\n")
