"""Course machinery. Settings of all tests: no randomness, no deadlines, one thread; GPU tests only on a GPU."""

import atexit
import gc
import importlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

# The tests' tensors are tiny: a second thread gains nothing, and on a busy machine its spinning triples the time. torch
# reads this when a test first imports it, and the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # where a test asks for more threads, they wait without spinning

# transformers shows on stderr how it writes a checkpoint, which some tests write first and others find.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# torch and transformers make half a million objects that stay: collect seldom, and not once more at the end.
gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)

# A background job of a shell script ignores Ctrl-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: no test fails by chance, and CI sees what the student sees.
# How long an example takes is the machine's affair: no deadline, and no complaint that making one is slow.
patient = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "course", derandomize=True, deadline=None, print_blob=False, suppress_health_check=patient
)
hypothesis.settings.load_profile("course")

# hypothesis also tries numbers that stand in the sources imported so far. Then a test's examples would depend on which
# other tests were collected with it, and on the student's own file: `check 14` and `check 14 --task 6` would differ.
providers._get_local_constants = lambda: providers._local_constants  # which stay empty


def pytest_collection_finish() -> None:
    """Leave modules and collected tests, which stay, out of collections: who asks for one waits for less."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _gpu_only(request: pytest.FixtureRequest) -> None:
    """Skip a test marked `gpu` if torch sees no CUDA device."""
    if request.node.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")


@pytest.fixture
def torch_threads() -> Iterator[int]:
    """The number of torch's threads: six, which a test may change. Restored afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield 6
    torch.set_num_threads(before)


@pytest.fixture
def serve_tiny() -> Iterator[Callable[..., Any]]:
    """Return what starts lesson 7's test server with these options, until the test ends."""
    pytest.importorskip("fastapi", reason="needs the extra 'server'")
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(importlib.import_module("tests.shared.service").Service(**options))
