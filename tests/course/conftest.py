"""Course machinery. Fixtures of the tests of the website: the built site (`site_http`, `site_file`) and a `browser`."""

from tests.course.site_fixtures import browser, site_file, site_folders, site_http

__all__ = ["browser", "site_file", "site_folders", "site_http"]
