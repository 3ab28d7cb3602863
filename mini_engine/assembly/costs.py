"""Course machinery. What a request costs in an engine's pools, by the layout that makes them, without weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.layout import check_kinds, has, pool_maker, window_kind
from mini_engine.model.kinds import Full, Latent, State, Window, attending, state_bytes


@dataclass(frozen=True)
class Unloaded:
    """What the layout asks of a model, without the model."""

    config: Any
    dtype: torch.dtype
    device: torch.device


class LayerCost(NamedTuple):
    """What the layers of one kind keep.

    kind: "full", "window", "latent" or "state". layers: of this kind. window: in tokens; None for other kinds.
    bytes_per_token: for each token that is kept; 0 for states.
    fixed_bytes: the most that one request holds, if that does not grow with its length; otherwise None.
    unused: of `bytes_per_token`, what the last group of windows leaves empty because it has fewer layers.
    """

    kind: str
    layers: int
    bytes_per_token: int
    fixed_bytes: int | None = None
    window: int | None = None
    unused: int = 0


class Costs:
    """The bytes that requests of a model hold in the pools of an engine.

    Counted is what running requests hold after a step: their blocks, whole ones, and their states. Prefixes kept for
    others, checkpoints of states and guesses come on top of it.

    Args:
        shape: a model's config. dtype: of the model. config: block size and KV dtype.

    Raises:
        UserError: such layers cannot be stored together.
    """

    def __init__(self, shape: Any, dtype: torch.dtype, config: EngineConfig) -> None:
        check_kinds(shape.layers)
        self.layers, self.block_size = shape.layers, config.block_size
        self.bytes_per_token = pool_maker(Unloaded(shape, dtype, torch.device("cpu")), config).bytes_per_token
        self.state_bytes = state_bytes(shape.layers, dtype)
        self.windows: Any = None
        if has(Window, shape.layers):
            self.windows = window_kind(shape.layers, 2, config)[0].memory

    @property
    def block_bytes(self) -> int:
        """The bytes of a block, of whichever group."""
        return self.bytes_per_token * self.block_size

    def request_bytes(self, num_tokens: int) -> int:
        """Return what one request holds when `num_tokens` of its tokens have been computed."""
        blocks = -(-num_tokens // self.block_size)
        if self.windows is not None:
            blocks += self.windows.num_groups * (blocks - self.windows.kept.first_block(num_tokens))
        return blocks * self.block_bytes + self.state_bytes

    def at_once(self, num_tokens: int, num_bytes: int) -> int:
        """Return how many requests of this length fit into a memory, beside the null block and the padding slot."""
        left = num_bytes - self.block_bytes - self.state_bytes
        return max(0, left // self.request_bytes(num_tokens))

    @property
    def fixed_bytes(self) -> int:
        """The bytes of one request that stay the same however long it is: its states, and its windows once full."""
        return sum(cost.fixed_bytes or 0 for cost in self.by_kind())

    def by_kind(self) -> list[LayerCost]:
        """Return the costs of each kind of layer."""
        keeping, found = attending(self.layers), []
        if has(Latent, self.layers):
            found.append(LayerCost("latent", len(keeping), self.bytes_per_token))
        else:
            windowed = 0 if self.windows is None else sum(isinstance(kind, Window) for kind in keeping)
            whole = len(keeping) - windowed or 1  # without a full layer, the first one is kept whole
            found.append(LayerCost("full", whole, self.bytes_per_token))
            if self.windows is not None:
                found.append(self._of_windows(len(keeping) - whole, whole))
        if states := sum(isinstance(kind, State) for kind in self.layers):
            found.append(LayerCost("state", states, 0, self.state_bytes))
        return found

    def _of_windows(self, layers: int, group: int) -> LayerCost:
        groups, window = self.windows.num_groups, self.windows.kept.window
        most = 1 + -(-(window - 1) // self.block_size)
        empty = (groups * group - layers) * self.bytes_per_token // group
        return LayerCost(
            "window", layers, groups * self.bytes_per_token, groups * most * self.block_bytes, window, empty
        )

    @property
    def keeps_first_whole(self) -> bool:
        """True if all layers that attend have windows: then the first one keeps every token all the same."""
        return self.windows is not None and Full() not in self.layers


def count_parameters(build: Callable[[Any], torch.nn.Module], shape: Any) -> int:
    """Return the number of parameters of a model of this shape; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(shape).parameters())
