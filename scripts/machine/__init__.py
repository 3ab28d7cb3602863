"""Course machinery. The measurements of a machine by `scripts/report.py`, and the report that it writes."""
