"""Course machinery. What `.ci/run` costs stays within a budget, by the processor time recorded in tests/times.json.

Protects all who wait for it. The clock decides nothing here: on a slow machine these tests pass as on a fast one.
"""

from collections import Counter

import pytest

from tests.costs import times

BUDGET = {"": 150.0, "ci": 410.0}  # processor seconds of all tests without a mark, and of CI's


@pytest.mark.parametrize("mark", BUDGET)
def test_the_tests_stay_within_their_budget(mark):
    recorded = {key.function: cost for key, cost in times().items() if key.mark == mark}
    dearest = [f"{cost} s {function}" for function, cost in Counter(recorded).most_common(8)]
    assert sum(recorded.values()) <= BUDGET[mark], f"take out as much as you add, or mark it nightly: {dearest}"


def test_no_function_of_the_fast_tests_is_dearer_than_a_lesson():
    assert max((cost for key, cost in times().items() if key.mark == ""), default=0.0) <= 15.0
