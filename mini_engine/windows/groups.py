"""Lesson 15. Groups: layers that keep the same tokens share a table, and all groups draw blocks from one pool.

    layer      0  1  2  3  4  5          S S F S S F: four layers with a window, two that see everything
    group      1  1  0  2  2  0          group 0: the full layers
    index      0  1  0  0  1  1          which of the pool's tensors holds the layer's K and V

The pool has as many tensors as group 0 has layers. So a block of one group has the same bytes as a block of any other,
and a block that one group frees can be the next one of another. The layers with a window are cut into groups of that
size; the last one may be smaller, and then wastes the rest of its blocks. vLLM deals them out: of n groups, each has
every n-th layer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mini_engine.checkpoint.config_schema import FULL


class Place(NamedTuple):
    """Where a layer's K and V are: its group's table says in which blocks, `index` in which of the pool's tensors."""

    group: int
    index: int


def places_of(layer_types: Sequence[str]) -> list[Place]:
    """Return the place of each layer.

    Group 0 has the full layers. A model of windows alone keeps its first layer there: the prefix tree needs a group
    that has a block for every token. The other layers fill groups 1, 2, … of the same size, one after another. In each
    group, `index` counts its layers from 0, in the model's order.

    Args:
        layer_types: FULL, or another type for a layer with a window.
    """
    full = [layer for layer, kind in enumerate(layer_types) if kind == FULL] or [0]
    windowed = [layer for layer in range(len(layer_types)) if layer not in full]
    places = {layer: Place(0, index) for index, layer in enumerate(full)}
    for position, layer in enumerate(windowed):
        places[layer] = Place(1 + position // len(full), position % len(full))
    return [places[layer] for layer in range(len(layer_types))]


def group_size(places: Sequence[Place]) -> int:
    """Return how many tensors the pool needs: the layers of group 0."""
    return sum(place.group == 0 for place in places)


def num_window_groups(places: Sequence[Place]) -> int:
    """Return how many groups have windows, and so tables with holes."""
    return max(place.group for place in places)
