"""Course machinery. What all tests share: no chance, no deadlines, two threads; GPU tests only on a GPU."""

import os

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "2")  # torch reads it when a test first imports it; smoke scripts inherit it

# The same examples at every run: a student's test never fails by chance, and CI sees what the student sees.
hypothesis.settings.register_profile("course", derandomize=True, deadline=None, print_blob=False)
hypothesis.settings.load_profile("course")


@pytest.fixture(autouse=True)
def _gpu_only(request: pytest.FixtureRequest) -> None:
    """Skip a test marked `gpu` where torch sees no CUDA device."""
    if request.node.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")
