"""Course machinery. The labs: a reader's own events on the lessons' own code, drawn by the lessons' own views."""

from scripts.live.labs import batch, pool, table, tree
from scripts.live.labs.lab import Lab

LABS: dict[str, Lab] = {module.LAB.name: module.LAB for module in (pool, table, batch, tree)}
