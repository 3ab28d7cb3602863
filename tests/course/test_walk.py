"""Course machinery. A stranger's way through the site works from its first step to its last.

Protects the whole: each part of the site has tests of its own; here one reader uses one after another.
"""

from scripts import ROOT
from scripts.website.walk import KEPT, PARTS, WIDTHS, name_of, walked

import pytest

from tests.course.test_live import needs_python


@needs_python
@pytest.mark.parametrize("kind", WIDTHS)
def test_a_stranger_comes_from_the_first_screen_to_a_lesson_that_is_done(kind, site_http, browser):
    rows, pictures = walked(browser, site_http, WIDTHS[kind])
    assert {row["part"] for row in rows} == set(PARTS) and len(rows) == len(pictures)
    kept = sorted(path.name for path in KEPT.glob(f"{kind}-*.webp"))
    named = [f"{kind}-{name_of(i, row)}.webp" for i, row in enumerate(rows, 1)]
    assert kept == named, "keep the screenshots of today's way: python -m scripts.website.walk --keep"


def test_the_kept_screenshots_are_light():
    assert sum(path.stat().st_size for path in KEPT.glob("*.webp")) < 1_500_000, KEPT.relative_to(ROOT)
