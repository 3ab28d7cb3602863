"""Course machinery. The conformance suite belongs to no lesson: `make test` only runs what is fast."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CHECKS_CONFIGS = {"test_as_transformers.py", "test_configs.py"}
FAST = CHECKS_CONFIGS | {"test_experts.py", "test_group_router.py", "test_sparse_layers.py"}  # milliseconds a test
FAST |= {"test_half.py"}  # each kind of model runs once


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests as CI's, but for the fast ones and those at night."""
    for item in items:
        if item.path.parent == FOLDER and item.path.name not in FAST and not item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.ci)
