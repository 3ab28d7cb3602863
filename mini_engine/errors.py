"""Lesson 0. The errors that a caller may want to catch, each told in one sentence."""


class UserError(ValueError):
    """Something the user gave cannot be used. Commands print the sentence and exit with 2.

    param: the name of the parameter at fault, where there is one; lesson 7's server reports it.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CacheFull(RuntimeError):
    """A contiguous cache has no room for the positions asked for (Lesson 1). Nothing was changed."""


class OutOfBlocks(RuntimeError):
    """A pool has fewer free blocks than were asked for (Lesson 2). Nothing was changed."""
