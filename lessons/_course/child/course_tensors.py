"""Course machinery. In a process under `check`: tells where two tensors differ that a test found unequal.

pytest shows a call such as `torch.equal(a, b)` with both tensors cut to some 240 characters, which rarely shows the
difference. So while a test runs, the two functions that compare tensors remember the last pair that differed.
"""

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from unittest.mock import patch

COMPARING = ("equal", "allclose")
BY_CALL = re.compile(r"where False = (<function (equal|allclose)\b|all\()")
SMALL = 8  # elements: a smaller tensor is shown whole


class LastPair:
    """The last two tensors that a test found different. A context manager, around one test."""

    def __init__(self) -> None:
        self.pair: tuple | None = None

    def __enter__(self) -> "LastPair":
        self.patches, torch = ExitStack(), sys.modules.get("torch")
        for name in COMPARING if torch else ():
            self.patches.enter_context(patch.object(torch, name, self._remembering(getattr(torch, name))))
        return self

    def __exit__(self, *exception) -> None:
        self.patches.close()

    def _remembering(self, compare: Callable) -> Callable:
        @wraps(compare, updated=())
        def remember(one, other, *args, **options):
            is_equal = compare(one, other, *args, **options)
            if not is_equal:
                self.pair = one, other, args, options
            return is_equal

        remember.__qualname__ = remember.__name__
        return remember

    def shown(self, message: str) -> list[str]:
        """Return [got, expected, how much differs] if the failure with this message is about the pair."""
        if self.pair is None or not BY_CALL.search(message):
            return []
        one, other, args, options = self.pair
        if one.shape != other.shape or one.dtype != other.dtype:
            return [kind(one), kind(other), ""]
        is_near = (args or options) and one.is_floating_point()
        return difference(one, other, ~one.isclose(other, *args, **options) if is_near else one != other)


def difference(one, other, unequal) -> list[str]:
    """Describe two tensors of one shape: both values at the first of the `unequal` places, and how many there are."""
    count = f"{int(unequal.sum())} of {unequal.numel()} values differ ({kind(one)})."
    if one.numel() <= SMALL:
        return [whole(one), whole(other), count]
    at = tuple(unequal.nonzero()[0].tolist())
    return [f"{one[at].item()} at {list(at)}", f"{other[at].item()} at {list(at)}", count]


def kind(tensor) -> str:
    """Return "float32 of shape (2, 3)"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def whole(tensor) -> str:
    return re.sub(r"\n\s*", " ", repr(tensor))
