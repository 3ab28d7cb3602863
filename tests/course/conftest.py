"""Course machinery. Fixtures of this folder's tests: the built site and a `browser`; the proofs about the lessons."""

import ast

import pytest

from tests.course.proofs import Proofs, Transcript, one_at_a_time
from tests.course.site_fixtures import SITE, browser, site_file, site_folders, site_http
from tests.record import is_on_record

__all__ = ["browser", "site_file", "site_folders", "site_http"]


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that opens a page in a browser as slow."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow(*SITE))


@pytest.fixture(scope="module")
def proofs(request, tmp_path_factory):
    """Run ahead what the selected tests of this module need."""
    proofs = Proofs(tmp_path_factory.mktemp("proofs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "parse", one_at_a_time(ast.parse))
        for item in request.session.items:
            if item.path == request.path and not is_on_record(item):
                proofs.expect(item)
        yield proofs
        proofs.pool.shutdown(cancel_futures=True)
    proofs.keep()


@pytest.fixture
def found(request, proofs):
    """Return what was worked out ahead for this test."""
    return proofs.futures[request.node.name].result()


@pytest.fixture
def transcript(request, proofs):
    """Return the golden text of this test's lesson."""
    return Transcript(proofs, request.node.callspec.params["lesson"], record=request.config.getoption("--record"))
