"""Course machinery. Shared by the smoke scripts: arguments, the Hugging Face side, the comparison, the report.

Import it before torch: it makes OpenMP's threads sleep while they wait, because spinning slows down a busy machine.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
