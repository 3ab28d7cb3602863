"""Course machinery. The matrix of features: a cell gives the expected tokens, or is refused as recorded.

Protects readers of what-works-with-what.md from combining two features that the page wrongly calls compatible. Cells of
several features show every pair for each change, each cell on another kind of layers; at night they run on every kind,
and every pair runs by itself.
"""

from itertools import combinations

from scripts.pages import matrix
from scripts.pages.matrix_cells import EITHER, FEATURES, KINDS, Cell, cells
from scripts.pages.matrix_covering import HIDES, covering
from scripts.pages.matrix_judges import difference, expected
from scripts.pages.matrix_run import run

import pytest

from mini_engine.engine.offline import Completion

CELLS = {cell.key: cell for cell in cells()}
COVERING = {cell.key: cell for cell in covering()}
TOGETHER = list(dict.fromkeys(cell.features for cell in COVERING.values()))
WITH_PROCESSES = {feature.name for feature in FEATURES if feature.starts_processes}


def is_quick(cell: Cell) -> bool:
    """Whether CI runs it: on one of the five kinds in turn; with processes, on the first that has it."""
    if cell.has("starts_processes"):
        return cell is next(one for one in COVERING.values() if one.features == cell.features)
    return TOGETHER.index(cell.features) % len(KINDS) == KINDS.index(cell.model)


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if is_quick(cell) else pytest.mark.nightly) for key, cell in COVERING.items()]
)
def test_several_features_together_give_the_expected_tokens(key):
    assert run(COVERING[key]) == matrix.EQUAL, key


@pytest.mark.nightly
@pytest.mark.parametrize("key", CELLS)
def test_each_feature_and_each_pair_works_or_is_refused_as_recorded(key):
    recorded, result = matrix.read_results()[key], run(CELLS[key])
    if recorded == matrix.EQUAL:
        assert result == matrix.EQUAL, f"{key}: {result}"
    else:
        assert result == recorded, f"{key} is recorded as refused; if it works now, run {matrix.COMMAND}"


def test_each_cell_has_a_result():
    assert set(matrix.read_results()) == set(CELLS), f"features were added or renamed; run {matrix.COMMAND}"


def test_each_pair_is_in_one_of_the_cells_of_several_features():
    covered = {(cell.model, pair) for cell in COVERING.values() for pair in combinations(cell.names, 2)}
    pairs = {(cell.model, cell.names) for cell in CELLS.values() if len(cell.names) == 2 and cell.model in KINDS}
    with_processes = {(model, names) for model, names in pairs if WITH_PROCESSES & {*names}}
    assert pairs - with_processes <= covered, "on a model of each kind of layers"
    assert {names for _, names in with_processes} <= {names for _, names in covered}, "on one model or another"
    assert covered <= pairs, "features that exclude each other are in one cell"
    for name in WITH_PROCESSES:
        assert {cell.model for cell in COVERING.values() if name in cell.names} == {*KINDS}


def test_another_token_or_another_logprob_is_a_difference():
    cell = next(cell for cell in CELLS.values() if cell.names == ("logprobs",))
    right = [Completion([], list(right.token_ids)) for right in expected(cell.asked)]
    assert "logprobs" in difference(cell, right), "answers without log probabilities are not what was asked for"
    plain = Cell(cell.model, ())
    assert difference(plain, right) == ""
    right[-1].token_ids[-1] += 1
    assert difference(plain, right).startswith("differs")


def test_the_features_that_exclude_or_hide_each_other_exist():
    names = {feature.name for feature in FEATURES}
    assert all(set(pair) <= names for pair in (*EITHER, *HIDES))
