"""Course machinery. What `scripts/report.py` measures of a machine, and the report that it writes."""
