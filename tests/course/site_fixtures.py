"""Course machinery. Fixtures: the built website and a browser, for the tests that open pages."""

import os
from collections.abc import Iterator
from pathlib import Path

from scripts.website.browser import Site, build_sites, find_browser, launched, served

import pytest
from filelock import FileLock  # torch brings it


@pytest.fixture(scope="session")
def site_folders(tmp_path_factory) -> dict[str, Path]:
    """Build the site strictly, for a server (`http`) and for reading from disk (`file`); once for all processes."""
    pytest.importorskip("material", reason="the site is built with mkdocs-material: pip install --group docs")
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folders = {kind: root / "site" / kind for kind in ("http", "file")}
    with FileLock(root / "site.lock"):
        if not (done := root / "site" / "done").exists():
            build_sites(folders)
            done.touch()
    return folders


@pytest.fixture(scope="session")
def site_http(site_folders) -> Iterator[Site]:
    """Serve the site on this machine."""
    with served(site_folders["http"]) as base:
        yield Site(site_folders["http"], base, is_file=False)


@pytest.fixture(scope="session")
def site_file(site_folders) -> Site:
    """Return the site as files, opened without a server."""
    return Site.on_disk(site_folders["file"])


@pytest.fixture(scope="module")  # not the session: while it lives, no other test can run an event loop of its own
def browser() -> Iterator:
    """Launch Chromium; skip the test if there is none."""
    pytest.importorskip("playwright", reason="needs playwright: pip install --group test")
    executable = find_browser()
    if executable is None:
        pytest.skip("needs Chromium or Chrome on the PATH: on Debian and Ubuntu, apt-get install chromium")
    with launched(executable) as found:
        yield found
