"""Course machinery. Fixtures: the built website and a browser, for the tests that open pages."""

from collections.abc import Iterator
from pathlib import Path

from scripts.website.browser import Site, build_sites, find_browser, launched, served

import pytest

SITE = ("lessons", "site", "mkdocs.yml", "scripts/website", "scripts/traces", "mini_engine", "README.md")
IN_EVERY_RUN = ("README.md", "l5_scheduler/README.md")  # the front page, and one with everything a lesson's page has


def on_a_page(page: str):
    """Return the page as a test's parameter: the few pages of every run, or a slow one."""
    return page if page in IN_EVERY_RUN else pytest.param(page, marks=pytest.mark.slow(*SITE))


@pytest.fixture(scope="session")
def site_folders(tmp_path_factory) -> dict[str, Path]:
    """Build the site strictly, for a server (`http`) and for reading from disk (`file`)."""
    pytest.importorskip("material", reason="the site is built with mkdocs-material: pip install --group docs")
    folders = {kind: tmp_path_factory.mktemp("site") / kind for kind in ("http", "file")}
    build_sites(folders)
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
