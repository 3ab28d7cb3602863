"""Lesson 9. Weights in the order in which a decode step reads them.

A "word" is 4 bytes: one float32, or a pair of bfloat16 that follow each other in a row of the weight. TILE outputs lie
together, and word i of all of them is one line of 64 bytes:

    packed[tile, i, output, p] = weight[tile * TILE + output, i * per_word + p]

So one load brings 16 outputs the same input, and a thread that owns some tiles reads memory from end to end. A tile
takes the bytes that its rows took, which is why packing needs no second copy of the weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 16
WORD_BYTES = 4
PIECE_BYTES = 4 * 2**20  # what is copied at once, and so all that packing needs besides the weight


class PackedWeight:
    """A weight `[out_features, in_features]` as tiles `[tiles, words, TILE, per_word]`, padded with zeros.

    The weight's own memory is used if nothing must be padded, and then the weight no longer holds its rows.
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
        """Rows `ids` `[T]` int64 of the weight, `[T, in_features]`: what an embedding looks up.

        Raises:
            IndexError: an id is not in 0 … out_features - 1.
        """
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"ids {int(ids.min())} … {int(ids.max())} are not all in 0 … {self.out_features - 1}")
        words = self.tiles.view(torch.int32)[..., 0][ids // TILE, :, ids % TILE]  # [T, words]
        return words.contiguous().view(self.tiles.dtype)[:, : self.in_features].contiguous()


def interleave(rows: Tensor, tiles: Tensor) -> None:
    """tiles `[n, words, TILE, per_word]` = rows `[n, TILE, words, per_word]` with its middle two swapped.

    Both may be the same memory: a tile's bytes stay a tile's, so piece by piece is safe.
    """
    step = max(1, PIECE_BYTES // tiles[:1].nbytes)
    for source, target in zip(rows.view(torch.int32).split(step), tiles.view(torch.int32).split(step), strict=True):
        target.copy_(source.transpose(1, 2).clone(memory_format=torch.contiguous_format))
