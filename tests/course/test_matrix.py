"""Course machinery. The matrix of features: a cell gives the expected tokens, or is refused as recorded.

Protects readers of what-works-with-what.md from combining two features that the page wrongly calls compatible.
"""

from scripts.pages import matrix
from scripts.pages.matrix_cells import EITHER, FEATURES, Cell, cells, difference, expected, run

import pytest

from mini_engine.engine.offline import Completion

CELLS = {cell.key: cell for cell in cells()}
SLOW = {"two ranks", "hand-over"}  # they start processes
QUICK = [key for key, cell in CELLS.items() if len(cell.features) == 1 and not SLOW & {*cell.names}]


def check(key):
    recorded, result = matrix.read_results()[key], run(CELLS[key])
    if recorded == matrix.EQUAL:
        assert result == matrix.EQUAL, f"{key}: {result}"
    else:
        assert result == recorded, f"{key} is recorded as refused; if it works now, run {matrix.COMMAND}"


@pytest.mark.parametrize("key", QUICK)
def test_each_feature_works_alone(key):
    check(key)


@pytest.mark.nightly
@pytest.mark.parametrize("key", [key for key in CELLS if key not in QUICK])
def test_each_pair_of_features_works_or_is_refused_as_recorded(key):
    check(key)


def test_the_page_fits_the_results():
    assert matrix.main(["--check"]) == 0, f"run {matrix.COMMAND}"
    assert set(matrix.read_results()) == set(CELLS), f"features were added or renamed; run {matrix.COMMAND}"


def test_another_token_or_another_logprob_is_a_difference():
    cell = next(cell for cell in CELLS.values() if cell.names == ("logprobs",))
    right = [Completion([], list(token_ids)) for token_ids in expected(cell.model, False)]
    assert "logprobs" in difference(cell, right), "answers without log probabilities are not what was asked for"
    plain = Cell(cell.model, ())
    assert difference(plain, right) == ""
    right[-1].token_ids[-1] += 1
    assert difference(plain, right).startswith("differs")


def test_the_features_that_exclude_each_other_exist():
    names = {feature.name for feature in FEATURES}
    assert all(set(pair) <= names for pair in EITHER)
