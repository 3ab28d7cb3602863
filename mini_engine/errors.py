"""Lesson 0. The errors that a caller may want to catch, each told in one sentence."""


class UserError(ValueError):
    """Something the user gave cannot be used. Commands print the sentence and exit with 2."""


class CacheFull(RuntimeError):
    """A contiguous cache has no room for the positions asked for (Lesson 1). Nothing was changed."""


class OutOfBlocks(RuntimeError):
    """A pool has fewer free blocks than were asked for (Lesson 2). Nothing was changed."""
