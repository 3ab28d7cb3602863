"""Lesson 18. The page's command that shows a sum in the making."""

import re

from scripts import partial_sums

import pytest


@pytest.mark.nightly
def test_the_parts_that_are_shown_add_up_to_what_is_shown(capsys):
    assert partial_sums.main([]) == 0, "add_up gives other bits than the ranks"
    rows = [re.findall(r"-?\d+\.\d+", line) for line in capsys.readouterr().out.splitlines()]
    numbers = [[float(number) for number in row] for row in rows if row]
    for first, second, total, alone in zip(*[iter(numbers)] * 4, strict=True):
        assert [a + b for a, b in zip(first, second, strict=True)] == pytest.approx(total, abs=2e-6)
        assert total == pytest.approx(alone, abs=1e-5), "one process, with the whole matrix"
