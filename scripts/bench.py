"""Course machinery. `python scripts/bench.py SUITE`: measure on this machine what the lessons claim.

The suites are the modules of scripts/bench/; `import scripts.bench` means that folder, never this file.
"""

import sys

from scripts.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
