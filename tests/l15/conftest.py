"""Lesson 15. Shared by its tests: tiers without a disk, and a manager with windows over them."""

import pytest


@pytest.fixture
def tiers():
    from mini_engine.tiers.tiers import Tiers

    tiers = Tiers.of_size(None, 10**7, 0)
    yield tiers
    tiers.close()


@pytest.fixture
def kv(tiers):
    from tests.shared.window_cells import connected

    return connected(tiers)
