"""Course machinery. What the smoke scripts share: arguments, the Hugging Face side, the comparison, the report.

Importing it before torch lets OpenMP's threads sleep while they wait: threads that spin make a busy machine crawl.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
