"""Lesson 9. The packed layout, written and read without a compiler: the place of each weight, and what it costs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mini_engine.layers import pack
from mini_engine.layers.pack import TILE, PackedWeight, interleave
from tests.support import must_raise

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (7, 5), (16, 64), (33, 50), (48, 77), (100, 131)]  # outputs, inputs: with and without padding


def weight_of(outputs, inputs, dtype):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).to(dtype)


def packed_by_hand(weight):
    """Return a PackedWeight built from the formula at the top of `pack.py`, one number at a time; padding is 7."""
    outputs, inputs = weight.shape
    per_word = 4 // weight.element_size()
    packed = object.__new__(PackedWeight)
    packed.out_features, packed.in_features = outputs, inputs
    shape = (-(-outputs // TILE), -(-inputs // per_word), TILE, per_word)
    packed.tiles = torch.full(shape, 7.0, dtype=weight.dtype)
    for row in range(outputs):
        for column in range(inputs):
            word, part = divmod(column, per_word)
            packed.tiles[row // TILE, word, row % TILE, part] = weight[row, column]
    return packed


class Allocations(TorchDispatchMode):
    """Notes the size in bytes of the largest tensor that torch creates meanwhile; views are not new tensors."""

    def __init__(self):
        super().__init__()
        self.most, self.largest = 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = func(*args, **kwargs or {})
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.most = max(self.most, x.untyped_storage().nbytes())
        return results


# Writing


@pytest.mark.task(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_every_weight_lies_where_the_layout_says(outputs, inputs, dtype):
    weight = weight_of(outputs, inputs, dtype)
    tiles = PackedWeight(weight.clone()).tiles
    per_word = 4 // weight.element_size()
    assert tiles.shape == (-(-outputs // TILE), -(-inputs // per_word), TILE, per_word)
    as_given = torch.zeros(tiles.shape[0] * TILE, tiles.shape[1] * per_word, dtype=dtype)
    as_given[:outputs, :inputs] = weight
    why = (
        ": words and outputs are not swapped within each tile"
        if torch.equal(tiles.flatten(), as_given.flatten())
        else ""
    )
    for row in range(outputs):
        words = tiles[row // TILE, :, row % TILE].flatten()
        assert torch.equal(words[:inputs], weight[row]), (
            f"output {row % TILE} of tile {row // TILE} must hold row {row} of the weight, bit for bit{why}"
        )
        assert not words[inputs:].any(), "padding must be zero: it is multiplied into the sums"


@pytest.mark.task(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_tiles_are_packed_in_place(dtype):
    weight = torch.randn(64, 32).to(dtype)
    place = weight.data_ptr()
    assert PackedWeight(weight).tiles.data_ptr() == place, "a second copy of the weights is a second model in memory"


@pytest.mark.task(1)
@pytest.mark.parametrize("shared", [True, False], ids=["the same memory", "other memory"])
def test_rows_become_tiles_in_the_same_memory_or_in_other(shared, monkeypatch):
    monkeypatch.setattr(pack, "PIECE_BYTES", 2 * TILE * 6 * 4)  # two tiles at a time, of five
    numbers = torch.arange(5 * TILE * 6, dtype=torch.float32)
    rows = numbers.clone().view(5, TILE, 6, 1)
    tiles = (rows if shared else torch.zeros_like(rows)).view(5, 6, TILE, 1)
    interleave(rows, tiles)
    assert torch.equal(tiles, numbers.view(5, TILE, 6, 1).transpose(1, 2)), (
        "every tile must hold its own rows' words, the outputs side by side; "
        "where rows and tiles are the same memory, read a piece completely before you write it"
    )
    if not shared:
        assert torch.equal(rows.flatten(), numbers), "the rows are only read"


@pytest.mark.task(1)
@pytest.mark.parametrize("piece", [1, 3], ids=["smaller than a tile", "three tiles"])
def test_packing_copies_a_piece_at_a_time(piece, monkeypatch):
    tile = TILE * 6 * 4
    monkeypatch.setattr(pack, "PIECE_BYTES", piece * tile if piece > 1 else 1)
    tiles = torch.randn(12, TILE, 6, 1)
    with Allocations() as allocations:
        interleave(tiles, tiles.view(12, 6, TILE, 1))
    assert allocations.most <= piece * tile, (
        f"{allocations.most} bytes were copied at once, and the whole weight is {12 * tile}: copy at most PIECE_BYTES, "
        "or one tile if that is larger, or a large matrix is in memory twice while it is packed"
    )


@pytest.mark.task(1)
def test_packing_moves_bits_and_does_not_round_them():
    rows = torch.arange(2 * TILE * 3 * 2, dtype=torch.int16).view(torch.bfloat16).view(2, TILE, 3, 2)
    rows[0, 0, 0] = torch.tensor([float("nan"), float("-inf")])
    want = rows.view(torch.int16).transpose(1, 2).clone()
    tiles = torch.zeros(2, 3, TILE, 2, dtype=torch.bfloat16)
    interleave(rows, tiles)
    assert torch.equal(tiles.view(torch.int16), want), "every bit of every word must arrive, NaN and infinity too"


# Reading


@pytest.mark.task(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_rows_come_back_out_of_the_tiles(outputs, inputs, dtype):
    weight = weight_of(outputs, inputs, dtype)
    packed, ids = packed_by_hand(weight), torch.tensor([outputs - 1, 0, outputs // 2, 0])
    got = packed.rows(ids)
    assert got.shape == (4, inputs), "the padding that fills up a tile's words is no part of a row: cut it off"
    assert got.dtype == dtype and torch.equal(got, weight[ids]), (
        f"rows {ids.tolist()} must come back as they went in: the embedding of a tied model is read this way"
    )
    assert got.is_contiguous(), "the layers read the rows by their address, so they must be contiguous"


@pytest.mark.task(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_ids_give_no_rows(dtype):
    got = packed_by_hand(weight_of(33, 51, dtype)).rows(torch.tensor([], dtype=torch.int64))
    assert (got.shape, got.dtype) == ((0, 51), dtype), "no ids are no mistake: they give no rows"


PADDING = "lies inside the padding of the last tile"


@pytest.mark.task(3)
@pytest.mark.parametrize(
    "ids, why",
    [
        ([0, -1], "would be counted from the end"),
        ([33, 2], PADDING),
        ([47], PADDING),
        ([48], "lies behind the last tile"),
    ],
    ids=str,
)
def test_a_row_outside_the_weight_is_refused(ids, why):
    packed = packed_by_hand(weight_of(33, 6, torch.float32))
    with must_raise(IndexError, f"rows({ids}) must be refused: the weight has rows 0 … 32, and one of these {why}"):
        packed.rows(torch.tensor(ids))


@pytest.mark.task(3)
def test_a_row_is_read_without_unpacking_the_weight():
    weight = weight_of(40 * TILE, 6, torch.float32)
    packed = packed_by_hand(weight)
    with Allocations() as allocations:
        packed.rows(torch.tensor([3, 600]))
    assert allocations.most <= 2 * TILE * 6 * 4, (
        f"{allocations.most} bytes were copied to return 2 rows of 24 bytes: index the tiles, do not unpack them"
    )


def test_what_was_packed_is_read_back():
    weight = weight_of(100, 131, torch.bfloat16)
    ids = torch.arange(99, -1, -1)
    assert torch.equal(PackedWeight(weight.clone()).rows(ids), weight[ids])
