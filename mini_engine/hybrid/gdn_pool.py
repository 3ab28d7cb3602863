"""Lesson 11. The state pool of gated delta nets: for every slot, a recurrent and a convolution state in each layer.

    slot 0                            padding: rows of a padded batch write here; never handed out
    slots 1 … max_reqs                working slots, one for each running request: its row in lesson 10's ReqToTokenPool
    the next max_track_slots slots    checkpoints: copies of states, for requests with the same beginning

The pool itself hands out only checkpoints. Names and methods are those of pymllm's GDNPool; the recurrent state is
always `[H_v, D_k, D_v]`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.hybrid.track_slots import TrackSlots
from mini_engine.model.kinds import State

PADDING_SLOT = 0


class GdnPool(TrackSlots):
    """States of all requests and checkpoints, zero at the start.

    Args:
        max_reqs: working slots, 1 … max_reqs.
        dtype: of the convolution states, the model's. Recurrent states are always float32: they accumulate.
        max_track_slots: slots for checkpoints.

    Attributes:
        recurrent_state: `[num_gdn_layers, num_slots, H_v, D_k, D_v]` float32.
        conv_state: `[num_gdn_layers, num_slots, conv_dim, conv_kernel_size - 1]`, the latest input last.

    Raises:
        UserError: a size is not possible, or the pool does not fit in memory.
    """

    def __init__(
        self,
        max_reqs: int,
        num_gdn_layers: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_dim: int,
        conv_kernel_size: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        max_track_slots: int = 0,
    ) -> None:
        super().__init__(max_reqs, max_track_slots)
        recurrent = (num_gdn_layers, self.num_slots, num_v_heads, head_k_dim, head_v_dim)
        conv = (num_gdn_layers, self.num_slots, conv_dim, conv_kernel_size - 1)
        try:
            self.recurrent_state = torch.zeros(recurrent, dtype=torch.float32, device=device)
            self.conv_state = torch.zeros(conv, dtype=dtype, device=device)
        except RuntimeError as error:
            raise UserError(
                f"{self.num_slots} state slots of {num_gdn_layers} layers do not fit in memory; use fewer requests or "
                "checkpoints"
            ) from error

    @classmethod
    def for_model(cls, config: Qwen3Config, max_reqs: int, **options) -> "GdnPool":
        """Return a pool for this model's layers that keep a state; `options` are the constructor's.

        A short convolution is a delta net without a matrix: its recurrent state has 0 heads.
        """
        states = [kind for kind in config.layers if isinstance(kind, State)]
        *recurrent, ((channels, columns), _) = states[0].shapes
        heads, key_dim, value_dim = recurrent[0][0] if recurrent else (0, 0, 0)
        return cls(max_reqs, len(states), heads, key_dim, value_dim, channels, columns + 1, **options)

    @property
    def value_shape(self) -> tuple[int, int]:
        """The shape of a token's values, and of its results: `(H_v, D_v)`."""
        heads, _, value_dim = self.recurrent_state.shape[2:]
        return heads, value_dim

    @property
    def conv_parts(self) -> Sequence[int]:
        """The channels of the convolution: of queries, keys and values; a short convolution has one part."""
        heads, value_dim = self.value_shape
        channels, values = self.conv_state.shape[2], heads * value_dim
        keys = (channels - values) // 2
        return (keys, keys, values) if heads else (channels,)

    @property
    def parts(self) -> Sequence[Sequence[Tensor]]:
        """One list: recurrent, then convolution states of each layer, tensors whose first dimension counts slots."""
        return ([layer for layer in (*self.recurrent_state, *self.conv_state) if layer.numel()],)

    @property
    def mem_bytes(self) -> int:
        """Size of the whole pool in bytes, used or not."""
        return self.recurrent_state.nbytes + self.conv_state.nbytes

    def get_layer_state(self, gdn_layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return one layer's recurrent `[num_slots, H_v, D_k, D_v]` and conv `[num_slots, conv_dim, K - 1]` states.

        Both are views: writing to them writes to the pool.

        Raises:
            IndexError: there is no such layer. Layers are counted among the delta nets only.
        """
        if not 0 <= gdn_layer_idx < len(self.recurrent_state):
            raise IndexError(
                f"there is no delta net {gdn_layer_idx}; they run from 0 to {len(self.recurrent_state) - 1}"
            )
        return self.recurrent_state[gdn_layer_idx], self.conv_state[gdn_layer_idx]

    def reset_states(self, slots: Sequence[int] | Tensor) -> None:
        """Zero both states of these slots, recurrent and conv, in every layer: the state before a text's first token.

        In place: recorded steps and views of a layer keep reading the pool's original tensors. Slot 0, padding, may be
        reset too. With no slots, a no-op.

        Args:
            slots: numbers or a tensor of any integer dtype; `_index` turns either into a tensor and checks it.

        Raises:
            ValueError: a slot is not in the pool, 0 … num_slots - 1; no slot was changed.
        """
        index = self._index(slots)
        self.recurrent_state[:, index] = 0
        self.conv_state[:, index] = 0

    def copy_states(self, src_index: int, dst_index: int) -> None:
        """Copy both states of one slot to another in every layer, in place; the source keeps its own.

        Either may be a working slot or a checkpoint.

        Raises:
            ValueError: a slot is not in the pool, or the target is padding, slot 0; nothing was copied.
        """
        self._index([src_index, dst_index])
        if dst_index == PADDING_SLOT:
            raise ValueError("slot 0 is padding; copy states to a slot of a request or a checkpoint")
        self.recurrent_state[:, dst_index] = self.recurrent_state[:, src_index]
        self.conv_state[:, dst_index] = self.conv_state[:, src_index]

    def _index(self, slots: Sequence[int] | Tensor) -> Tensor:
        """Return slots as `[n]` int64 on the pool's device. Raises ValueError if one is not in the pool."""
        index = torch.as_tensor(slots, dtype=torch.int64, device=self.conv_state.device).flatten()
        if index.device.type == "cpu" and ((index < 0) | (index >= self.num_slots)).any():
            raise ValueError(f"slots {index.tolist()} are not all in 0 … {self.num_slots - 1}")
        return index
