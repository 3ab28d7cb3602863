"""Course machinery. With prefix sharing on, the tests of lessons 5 to 7 pass unchanged.

Protects the rule that a part changes nothing it is not asked for: lesson 8's sharing against lessons 5 to 7.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize("lesson", [5, 6, 7])
def test_the_tests_of_earlier_lessons_pass_with_prefix_sharing(lesson):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.l8.with_sharing", f"tests/l{lesson}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
