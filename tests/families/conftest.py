"""Course machinery. The conformance suite belongs to no lesson: CI runs it, and `make test` leaves it out."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests as CI's, but for those at night."""
    for item in items:
        if item.path.parent == FOLDER and not item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.ci)
