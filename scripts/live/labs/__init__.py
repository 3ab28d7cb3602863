"""Course machinery. The labs: a reader's own events on the lessons' own code, drawn by the lessons' own views."""

from scripts.live.labs.batch import Batch
from scripts.live.labs.evictor import Evictor
from scripts.live.labs.lab import Lab
from scripts.live.labs.pool import Pool
from scripts.live.labs.table import Tables
from scripts.live.labs.tree import Tree

LABS: dict[str, type[Lab]] = {lab.name: lab for lab in (Pool, Tables, Batch, Tree, Evictor)}
