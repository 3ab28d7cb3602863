"""Course machinery. Fixtures of this folder's tests: the built site and a `browser`; a `toy`; proofs about lessons."""

import ast
from pathlib import Path

import pytest

from tests.course.proofs import Proofs, one_at_a_time
from tests.course.site_fixtures import browser, site, site_file, site_folders, site_http, visit
from tests.course.toy import Toy

__all__ = ["browser", "site", "site_file", "site_folders", "site_http", "visit"]


FOLDER = Path(__file__).parent
OF_STUDENTS = {  # what students run, their own machine may break, and `make test` runs
    *("test_setup_env.py", "test_scaffold.py", "test_lessons_starter.py", "test_lessons_overlay.py"),
    *("test_lessons_check.py", "test_lessons_odd.py", "test_lessons_commands.py", "test_lessons_verdicts.py"),
    "test_pool_command.py",
}


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests: those that open a page in a browser as nightly, others as CI's."""
    for item in items:
        if item.path.parent != FOLDER or item.get_closest_marker("ci") or item.get_closest_marker("nightly"):
            continue
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.nightly)
        elif item.path.name not in OF_STUDENTS:
            item.add_marker(pytest.mark.ci)


@pytest.fixture
def toy(tmp_path) -> Toy:
    """Return a toy course in a folder of its own."""
    return Toy(tmp_path)


@pytest.fixture(scope="module")
def proofs(request, tmp_path_factory):
    """Run ahead what the selected tests of this module need."""
    proofs = Proofs(tmp_path_factory.mktemp("proofs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "parse", one_at_a_time(ast.parse))
        for item in request.session.items:
            if item.path == request.path:
                proofs.expect(item)
        yield proofs
        proofs.pool.shutdown(cancel_futures=True)


@pytest.fixture
def found(request, proofs):
    """Return what was worked out ahead for this test."""
    return proofs.futures[request.node.name].result()
