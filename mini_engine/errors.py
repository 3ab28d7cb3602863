"""Lesson 0. The errors that callers may want to catch; each message is one sentence."""


class UserError(ValueError):
    """The user's input cannot be used. Commands print the message and exit with 2.

    param: the name of the offending parameter, if there is one; lesson 7's server reports it.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CacheFull(RuntimeError):
    """A contiguous cache has fewer rows than the sequence has tokens (Lesson 1). Nothing was changed."""


class OutOfBlocks(RuntimeError):
    """A pool has fewer free blocks than were requested (Lesson 2). Nothing was changed."""
