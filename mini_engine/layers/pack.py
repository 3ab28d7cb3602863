"""Lesson 9. Packs weights in the order in which a decode step reads them.

A "word" is 4 bytes: one float32, or two neighbouring bfloat16 of a row. TILE outputs are packed together, and their
words with the same index i form one line of 64 bytes:

    packed[tile, i, output, p] = weight[tile * TILE + output, i * per_word + p]

So one load fetches the weights of 16 outputs for the same inputs, and a thread that owns some tiles reads memory
sequentially. A tile takes exactly the bytes of its rows, so packing needs no second copy of the weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 16
WORD_BYTES = 4
PIECE_BYTES = 4 * 2**20  # copied at a time: all the memory that packing needs in addition to the weight


class PackedWeight:
    """A weight `[out_features, in_features]` as tiles `[tiles, words, TILE, per_word]`, padded with zeros.

    Unless it needs padding, the weight is packed in its own memory and no longer holds its rows.
    """

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        per_word = WORD_BYTES // weight.element_size()
        spare = (-self.in_features % per_word, -self.out_features % TILE)
        if any(spare) or not weight.is_contiguous():
            weight = F.pad(weight, (0, spare[0], 0, spare[1])).contiguous()
        self.tiles = weight.view(-1, weight.shape[1] // per_word, TILE, per_word)
        interleave(weight.view(-1, TILE, weight.shape[1] // per_word, per_word), self.tiles)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` `[T]` int64 of the weight as `[T, in_features]`, like an embedding lookup.

        A new, contiguous tensor of the weight's dtype, without padding. Ids may repeat, and there may be none. Reads
        only these rows: the weight is not unpacked.

        Raises:
            IndexError: an id is not in 0 … out_features - 1.
        """
        asked = ids.tolist()
        if asked and not 0 <= min(asked) <= max(asked) < self.out_features:
            raise IndexError(f"ids {min(asked)} … {max(asked)} are not all in 0 … {self.out_features - 1}")
        words = self.tiles.view(torch.int32)[..., 0][ids // TILE, :, ids % TILE]  # [T, words]
        return words.contiguous().view(self.tiles.dtype)[:, : self.in_features].contiguous()


def interleave(rows: Tensor, tiles: Tensor) -> None:
    """Copy rows `[n, TILE, words, per_word]` into tiles `[n, words, TILE, per_word]`: swap the middle two dimensions.

    Both may share memory. A tile replaces its own rows, so working piece by piece is safe. At most
    PIECE_BYTES are copied at a time, or one tile if that is larger: never the whole weight.
    """
    step = max(1, PIECE_BYTES // tiles[:1].nbytes)
    for source, target in zip(rows.view(torch.int32).split(step), tiles.view(torch.int32).split(step), strict=True):
        target.copy_(source.transpose(1, 2).clone(memory_format=torch.contiguous_format))
