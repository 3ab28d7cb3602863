"""Course machinery. Every kernel of the table as a fixture; Triton's are interpreted in a process of their own."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.kernels.table import CPP, DTYPES, IN_PROCESS, ON_GPU, TRITON, Entry
from tests.shared.pickled import Worker


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Worker]:
    """A process in which Triton interprets its kernels."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("NOT CHECKED: the Triton kernels; Triton is not installed")
    worker = Worker("tests.kernels.triton_worker")
    yield worker
    worker.close()


@pytest.fixture(params=TRITON, ids=str)
def triton(request: pytest.FixtureRequest, interpreter: Worker) -> Entry:
    """Each kernel in Triton, interpreted."""
    return replace(request.param, interpret=interpreter)


NIGHTLY = [pytest.param(one, marks=pytest.mark.nightly) for one in TRITON]  # the interpreter is slow


@pytest.fixture(params=[*IN_PROCESS, *NIGHTLY, *ON_GPU], ids=str)
def kernel(request: pytest.FixtureRequest) -> Entry:
    """Each kernel of the table."""
    if request.param not in TRITON:
        return request.param
    return replace(request.param, interpret=request.getfixturevalue("interpreter"))


@pytest.fixture(params=IN_PROCESS, ids=str)
def quick(request: pytest.FixtureRequest) -> Entry:
    """Each kernel that this process can run on a CPU."""
    return request.param


@pytest.fixture(params=CPP, ids=str)
def cpp(request: pytest.FixtureRequest) -> Entry:
    """Each kernel in C++."""
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest):
    """The dtype of the queries."""
    return request.param
