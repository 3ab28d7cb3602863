"""Course machinery. What the tables of kept runs (`measured.py`) are made of."""

from typing import Any

Row = dict[str, Any]


def digits(value: float) -> str:
    """Return a number with three digits or, above, whole."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def of_part(report: Row, part: str) -> list[Row]:
    """Return the rows of one part of a suite."""
    return [row for row in report["rows"] if row["part"] == part]
