"""Course machinery. With a later lesson's part switched on, the tests of earlier lessons pass unchanged.

Protects two rules: a fast part changes no token, so lesson 9's layers pass the parity tests of lessons 0 to 8; a part
changes nothing that it is not asked for, so with lesson 8's prefix sharing the tests of lessons 5 to 7 pass.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.layers import native

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[2]
PARITY = (
    "tests/l0/test_loop.py",
    "tests/l1/test_contiguous.py",
    "tests/l2/test_parity.py",
    "tests/l3/test_packed.py",
    "tests/l4/test_parity.py",
    "tests/l5/test_parity.py",
    "tests/l5/test_runner.py",
    "tests/l6/test_llm.py",
    "tests/l8/test_kv.py",
)


def python(*arguments: str, backend: str = "torch") -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MINI_ENGINE_BACKEND": backend}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, encoding="utf-8")


def assert_pass(plugin: str, *tests: str, **options: str) -> None:
    done = python("-m", "pytest", "-q", "-x", "-p", plugin, *tests, **options)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("lesson", [5, 6, 7])
def test_with_prefix_sharing(lesson):
    assert_pass("tests.l8.with_sharing", f"tests/l{lesson}")


def test_the_plugin_gives_the_models_of_those_tests_fast_layers():
    code = (
        "from tests.l9 import with_packed; with_packed.pytest_configure(None); from tests import support\n"
        "print(type(support.load_model('mini_engine/pocket').model).__name__)"
    )
    done = python("-c", code)
    assert done.stdout.split() == ["TorchModel"], f"the slow model is tested again: {done.stderr[-999:]}"


@pytest.mark.parametrize("backend", ["packed", "torch"])
def test_with_fast_layers(backend):
    if backend == "packed":
        try:
            native.Functions(torch.float32)
        except UserError as why:
            pytest.skip(f"NOT CHECKED: earlier lessons with packed weights; {why}")
    assert_pass("tests.l9.with_packed", *PARITY, backend=backend)
