"""Course machinery. The command that measures the site's pages says what exceeds a limit, in 80 columns.

Protects readers from a page that grows past a limit without anyone being told.
"""

from scripts.website.measure import COLUMNS, broken, show

FINE = dict.fromkeys(COLUMNS, 0) | {"page": "l5_scheduler/README.md", "1280": 100, "390": 100, "320": None}


def test_each_limit_is_reported_with_its_page():
    for change in (
        {"high": 12_001},
        {"KB": 361},
        {"shift": 0.051},
        {"1280": 0},
        {"390": 99},
        {"320": 92},
        {"faint": 3},
    ):
        (said,) = broken(FINE | change)
        assert said.startswith(FINE["page"]), "say which page it is"
        assert str(*change.values()) in said, "say what was measured"
    assert not broken(FINE), "a page without a figure, and one within its limits, pass"
    assert not broken(FINE | {"page": "api.md", "KB": 361}), "the limit of bytes is for lessons"


def test_the_table_fits_80_columns(capsys):
    show([FINE | {"page": "a-page-with-a-very-long-name-indeed.md", "raw KB": 123456, "high": 123456}])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
