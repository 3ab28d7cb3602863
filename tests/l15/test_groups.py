"""Lesson 15. Groups: every layer has a place of its own, and a block of any group has the same bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.model.kinds import Full, Window
from mini_engine.windows.groups import Place, group_size, num_window_groups, places_of

FULL, SLIDING = Full(), Window(5)


def types(letters):
    return tuple({"F": FULL, "S": SLIDING}[letter] for letter in letters)


@pytest.mark.task(1)
@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("SSFSSF", [(1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (0, 1)]),
        ("FS", [(0, 0), (1, 0)]),
        ("SF", [(1, 0), (0, 0)]),
        ("SSSF", [(1, 0), (2, 0), (3, 0), (0, 0)]),
        ("FFFS", [(0, 0), (0, 1), (0, 2), (1, 0)]),
        ("SFSFS", [(1, 0), (0, 0), (1, 1), (0, 1), (2, 0)]),
    ],
)
def test_full_layers_are_group_0_and_windows_fill_groups_of_the_same_size(letters, expected):
    got = list(places_of(types(letters)))
    full = [place for place, letter in zip(got, letters, strict=True) if letter == "F"]
    assert full == [(0, index) for index in range(letters.count("F"))], (
        f"{letters}: full layers are group 0, in order; entry i of the list is layer i's"
    )
    assert got == [Place(*place) for place in expected], (
        f"{letters}: windows fill group 1, then group 2 and so on, as large as group 0; (group, index) of each layer"
    )
    kinds = {type(place) for place in got}
    assert kinds == {Place}, "others read `place.group` and `place.index`: return Places, not plain tuples"


@pytest.mark.task(1)
@pytest.mark.parametrize("letters", ["SS", "SSSSS"])
def test_a_model_of_windows_alone_keeps_its_first_layer_whole(letters):
    places = list(places_of(types(letters)))
    assert places[0] == Place(0, 0), "the prefix tree needs a group that has a block for every token"
    assert places[1:] == [Place(group, 0) for group in range(1, len(letters))], "the others are groups of one layer"


@pytest.mark.task(1)
@given(st.text(alphabet="FS", min_size=2, max_size=20).filter(lambda letters: "S" in letters))
def test_no_two_layers_share_a_place_and_the_pool_holds_all(letters):
    layers = types(letters)
    places = list(places_of(layers))
    assert len(set(places)) == len(layers), f"{letters}: two layers would write over each other's K and V"
    size = max(1, letters.count("F"))
    assert group_size(places) == size, f"{letters}: the pool has a tensor for each full layer"
    largest = max(place.index for place in places)
    assert largest < size, f"{letters}: an index beyond the pool's tensors"
    if FULL in layers:
        found = [place.group == 0 for place in places]
        assert found == [kind == FULL for kind in layers], f"{letters}: full layers, and no others, are in group 0"
    fewest = -(-(len(layers) - size) // size)
    assert num_window_groups(places) == fewest, f"{letters}: as few groups as there can be"
