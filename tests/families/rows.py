"""Course machinery. The rows of the conformance suite: each family's tiny random checkpoints.

Adding a family is one more Row, and no test file: its name, how transformers writes it, what chunks should straddle.
"""

import functools
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.l11 import models as hybrids
from tests.l15 import lfm3
from tests.l15 import models as windows
from tests.l16 import models as latents
from tests.support import FAMILIES, write_checkpoint

BLOCK = 8  # tokens in a block, and
INTERVAL = 16  # between two checkpoints of states, in the engines of all tests


@dataclass(frozen=True)
class Row:
    """A family.

    shapes: names of its checkpoints. The first runs in every test, the others only in some, and at night in all.
    path_of: returns a shape's checkpoint.
    straddle: the tokens that chunks and prompts should straddle, for all shapes or for each: the window, what lies
        between two checkpoints of a state, or a block.
    """

    name: str
    shapes: Iterable[str]
    path_of: Callable[[str], Path]
    straddle: int | Callable[[str], int] = BLOCK


@dataclass(frozen=True)
class Model:
    """One checkpoint of a family, and how its K and V are stored: `kv_dtype` is an engine's option."""

    family: str
    shape: str
    row: Row = field(compare=False, repr=False)
    kv_dtype: str = "auto"

    def __str__(self) -> str:
        return ", ".join([self.family, self.shape, *([] if self.is_exact else [self.kv_dtype])])

    @property
    def is_exact(self) -> bool:
        """True if its tokens must be Hugging Face's."""
        return self.kv_dtype == "auto"

    @property
    def path(self) -> Path:
        return self.row.path_of(self.shape)

    @property
    def straddle(self) -> int:
        found = self.row.straddle
        return found(self.shape) if callable(found) else found


def written_as(architecture: str, shapes: Mapping[str, Mapping[str, Any]]) -> Callable[[str], Path]:
    """Return what writes a shape's checkpoint, once per run. shapes: what differs from `tests.support.BASE` in each.

    architecture: of transformers, such as "Qwen3"; a model with something else than attention is initialised elsewhere.
    """

    @functools.cache
    def path_of(shape: str) -> Path:
        keeper = tempfile.TemporaryDirectory(prefix="kv-course-", ignore_cleanup_errors=True)
        _KEEPERS.append(keeper)  # removed when the test process ends
        return write_checkpoint(Path(keeper.name), architecture=architecture, **shapes[shape])

    return path_of


def window_of(shape: str) -> int:
    """Return the window of one of lesson 15's random Qwen3s."""
    return windows.FAMILIES[shape]


_KEEPERS: list[tempfile.TemporaryDirectory] = []
QWEN3 = {
    "two, tied, wide heads": FAMILIES["two, tied, wide heads"],
    "131 tokens": dict(vocab_size=131, num_key_value_heads=4),  # a prime: two ranks cannot share them evenly
    **FAMILIES,
}
ROWS = (
    Row("Qwen3", QWEN3, written_as("Qwen3", QWEN3)),
    Row("Qwen3.5", hybrids.FAMILIES, hybrids.checkpoint, INTERVAL),
    Row("Qwen3 with windows", windows.FAMILIES, lambda shape: windows.checkpoint(shape, window_of(shape)), window_of),
    Row("LFM3", lfm3.SHAPES, lfm3.checkpoint, lambda shape: lfm3.SHAPES[shape][1]),
    Row("DeepSeek-V3", latents.FAMILIES, latents.checkpoint),
)
FORMATS = ("int8", "int4")  # lesson 17's
MODELS = [[Model(row.name, shape, row) for shape in row.shapes] for row in ROWS]
FIRST = [models[0] for models in MODELS]
OTHERS = [model for models in MODELS for model in models[1:]]
ROUNDED = [Model(model.family, model.shape, model.row, kv_dtype) for model in FIRST for kv_dtype in FORMATS]


def some(models: Iterable[Model], *marks: Any) -> list[Any]:
    """Return parameters of these models, with marks."""
    return [pytest.param(model, id=str(model), marks=marks) for model in models]


def parametrized(*params: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", [param for group in params for param in group])


nightly = pytest.mark.nightly
SECOND = [models[1] for models in MODELS]
INT4 = [model for model in ROUNDED if model.kv_dtype == "int4"]  # the coarsest rows, over the same paths as int8's
each_family = parametrized(some(FIRST), some([*OTHERS, *ROUNDED], nightly))
each_exact = parametrized(some(FIRST), some(OTHERS, nightly))
each_shape = parametrized(some([*FIRST, *SECOND]), some((one for one in OTHERS if one not in SECOND), nightly))
each_format = parametrized(
    some([*FIRST, *INT4]), some((one for one in [*OTHERS, *ROUNDED] if one not in INT4), nightly)
)
