"""Course machinery. `python scripts/bench.py SUITE`: measure the lessons' claims on this machine.

The suites are the modules of scripts/bench/; `import scripts.bench` means that folder, never this file.
"""

import sys

from scripts.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
