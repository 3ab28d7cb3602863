"""Lesson 15. Groups: layers that keep the same tokens share a table, and all groups allocate blocks from one pool.

    layer      0  1  2  3  4  5          S S F S S F: four layers with a window, two that see everything
    group      1  1  0  2  2  0          group 0: the full layers
    index      0  1  0  0  1  1          which of the pool's tensors holds the layer's K and V

The pool has as many tensors as group 0 has layers. So blocks of all groups have the same size, and a block that one
group frees can be allocated by another. The layers with a window are divided into groups of that size; the last one may
be smaller, and then wastes the rest of its blocks. vLLM interleaves them: with n groups, each has every n-th layer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mini_engine.model.kinds import Full, Kind


class Place(NamedTuple):
    """The place of a layer's K and V: in the blocks of its group's table, in the pool's tensor number `index`."""

    group: int
    index: int


def places_of(layers: Sequence[Kind]) -> list[Place]:
    """Return the place of each layer.

    Group 0 has the full layers. If all layers have windows, the first layer goes there: the prefix tree needs a group
    with a block for every token. The other layers fill groups 1, 2, … of the same size, one after another. In each
    group, `index` counts its layers from 0, in the model's order.

    Args:
        layers: the kind of each: FULL, or a Window.
    """
    full = [layer for layer, kind in enumerate(layers) if kind == Full()] or [0]
    windowed = [layer for layer in range(len(layers)) if layer not in full]
    places = {layer: Place(0, index) for index, layer in enumerate(full)}
    for position, layer in enumerate(windowed):
        places[layer] = Place(1 + position // len(full), position % len(full))
    return [places[layer] for layer in range(len(layers))]


def group_size(places: Sequence[Place]) -> int:
    """Return the number of tensors that the pool needs: the layers of group 0."""
    return sum(place.group == 0 for place in places)


def num_window_groups(places: Sequence[Place]) -> int:
    """Return the number of groups with windows, whose tables have holes."""
    return max(place.group for place in places)
