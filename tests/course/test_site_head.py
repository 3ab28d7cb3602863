"""Course machinery. What a built page says about itself, and what its drawings refer to.

Protects what a reader misses without looking for it: an arrow's head, a page's date and author.
"""

import re

DRAWN = re.compile(r"""url\(["']?#([^)"']+)""")


def test_every_arrowhead_and_pattern_that_a_page_refers_to_is_on_it(site_folders):
    """A drawing's rules leave its SVG when it becomes part of a page; the ids that they name must follow."""
    dead = []
    for path in sorted(site_folders["http"].rglob("*.html")):
        html = path.read_text(encoding="utf-8")
        ids = set(re.findall(r'\bid="([^"]+)"', html))
        dead += [f"{path.parent.name}: url(#{name})" for name in DRAWN.findall(html) if name not in ids]
    assert not dead, dead
