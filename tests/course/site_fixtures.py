"""Course machinery. Fixtures: the built website and a browser, for the tests that open pages."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from scripts.website.browser import Site, build_sites, find_browser, launched, served, visiting

import pytest
from filelock import FileLock  # torch brings it

PATIENCE_MS = 90_000  # to load Python on a busy machine


class Builds(dict[str, Path]):
    """Strict builds of the site, for a server (`http`) and for reading from disk (`file`): each when it is needed."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, kind: str) -> Path:
        folder = self.root / kind
        self.root.mkdir(exist_ok=True)
        with FileLock(self.root / f"{kind}.lock"):  # of all processes, the first builds
            if not (done := self.root / f"{kind}.done").exists():
                build_sites({kind: folder})
                done.touch()
        self[kind] = folder
        return folder


@pytest.fixture(scope="session")
def site_folders(tmp_path_factory) -> Builds:
    """Return the builds of the site, one folder for each kind."""
    pytest.importorskip("material", reason="the site is built with mkdocs-material: pip install --group docs")
    base = tmp_path_factory.getbasetemp()
    return Builds((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site")


@pytest.fixture(scope="session")
def site_http(site_folders) -> Iterator[Site]:
    """Serve the site on this machine."""
    with served(site_folders["http"]) as base:
        yield Site(site_folders["http"], base, is_file=False)


@pytest.fixture(scope="session")
def site_file(site_folders) -> Site:
    """Return the site as files, opened without a server."""
    return Site.on_disk(site_folders["file"])


@pytest.fixture
def site(way: str, request: pytest.FixtureRequest) -> Site:
    """Return the site as the test's parameter `way` says."""
    return request.getfixturevalue(f"site_{way}")


@pytest.fixture(scope="module")  # not the session: while it lives, no other test can run an event loop of its own
def browser() -> Iterator:
    """Launch Chromium; skip the test if there is none."""
    pytest.importorskip("playwright", reason="needs playwright: pip install --group test")
    executable = find_browser()
    if executable is None:
        pytest.skip("needs Chromium or Chrome on the PATH: on Debian and Ubuntu, apt-get install chromium")
    with launched(executable) as found:
        yield found


@pytest.fixture
def visit(site_http, browser) -> Iterator[Callable]:
    """Return a function that opens a page of the served site in a new tab. At the end, no tab may have complained."""
    with ExitStack() as tabs:
        visitors = []

        def open_page(source: str = "README.md", **look):
            visitors.append(tabs.enter_context(visiting(browser, site_http, **look)))
            visitors[-1].page.set_default_timeout(PATIENCE_MS)
            visitors[-1].page.goto(site_http.url(source))
            return visitors[-1].page

        yield open_page
        complaints = [text for visitor in visitors for text in visitor.complaints]
        assert not complaints, "\n".join(complaints)
