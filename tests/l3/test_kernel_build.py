"""Lesson 3. The C++ kernel is built where it can be, and where it cannot, everything still works and says so."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mini_engine.attention import cpu, registry
from mini_engine.base import native_build
from mini_engine.base.errors import UserError
from tests.kernels.cases import make_case
from tests.support import forget_builds, refused

pytestmark = pytest.mark.reference
ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "mini_engine").rglob("*.cpp"))
posix_only = pytest.mark.skipif(os.name != "posix", reason="NOT CHECKED: needs a POSIX shell and signals")


@pytest.fixture
def compiler():
    try:
        return native_build.find_compiler()
    except UserError as why:
        pytest.skip(f"NOT CHECKED: building the C++ kernel; {why}")


@pytest.fixture
def copier(compiler, tmp_path, monkeypatch):
    """A compiler that copies the library that this machine has anyway: as good as a real one, and takes no seconds."""
    with contextlib.suppress(UserError):
        cpu.LIBRARY.load()
    built = native_build.cache_dir() / native_build.library_name(cpu.LIBRARY.sources)
    if os.name != "posix" or not built.exists():
        return  # the real compiler, then
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "copier", f'for last; do :; done; cp "{built}" "$last"'))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory, and a process that has not asked for a kernel yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache" / "mini_engine"
    forget()


def forget():
    forget_builds(cpu.LIBRARY)
    registry._say_once.cache_clear()


def best_kernel() -> str:
    """The name of the best kernel, asked for twice and tried."""
    case = make_case([(1, 9), (3, 8)])
    kernel = [registry.load_kernel("auto") for _ in range(2)][-1]
    assert case.error_of(kernel(*case.inputs)) < 1e-5
    return kernel.name


def kept(cache: Path) -> list[str]:
    return [path.name for path in cache.glob("*")]


def fake_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def start_process(**environment) -> subprocess.Popen:
    """Another process that asks for the C++ kernel, with the same cache directory."""
    use = "from mini_engine.attention.registry import load_kernel; print(load_kernel('cpu').name)"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    return subprocess.Popen([sys.executable, "-c", use], cwd=ROOT, env=os.environ | environment, **pipes)


def test_without_a_compiler_torch_does_the_work_and_one_notice_says_so(cache, monkeypatch, capfd):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert best_kernel() == "torch"
    err = capfd.readouterr().err
    assert err.count("no-such-compiler") == 1 and err.count("\n") == 1, err
    with refused(UserError, "no-such-compiler"):
        registry.load_kernel("cpu")


@posix_only
def test_a_compiler_that_fails_is_told_with_its_complaint(cache, monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "broken", "echo 'error: out of ideas' >&2; exit 1"))
    assert best_kernel() == "torch"
    err = capfd.readouterr().err
    assert err.count("out of ideas") == 1, err
    assert err.count("compiling") == 1, "what failed once is not tried again at every load"
    assert kept(cache) == [], "a failed build leaves nothing behind"


@posix_only
def test_a_build_that_cannot_be_loaded_is_told_with_the_loaders_complaint(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "junk", 'for last; do :; done; echo junk > "$last"'))
    with refused(UserError, "paged_cpu.cpp junk paged_cpu-"):
        registry.load_kernel("cpu")
    assert kept(cache) == [], "a library that cannot be loaded is not kept"


@pytest.mark.nightly
def test_a_library_is_built_once_and_then_used_without_a_compiler(cache, monkeypatch, capfd, compiler):
    assert best_kernel() == "cpu"
    assert "compiling" in capfd.readouterr().err, "the first use takes seconds, and says why"
    forget()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert best_kernel() == "cpu"
    assert capfd.readouterr().err == "", "later ones take nothing and say nothing"


def test_a_damaged_library_is_built_again(copier, cache):
    cache.mkdir(parents=True)
    (cache / native_build.library_name(cpu.LIBRARY.sources)).write_bytes(b"not a library")
    assert best_kernel() == "cpu"
    assert len(kept(cache)) == 1, f"one library and no leftovers, found {kept(cache)}"


def test_a_cache_that_cannot_be_written_costs_a_build_but_works(copier, cache, capfd):
    cache.parent.write_text("a file where a directory should be", encoding="utf-8")
    assert best_kernel() == "cpu"
    assert "cannot be written" in capfd.readouterr().err


@pytest.mark.nightly
def test_two_processes_may_build_at_once(cache, compiler):
    processes = [start_process(OMP_NUM_THREADS="1") for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out.strip()) == (0, "cpu"), err
    assert len(kept(cache)) == 1, f"one library and no leftovers, found {kept(cache)}"


@pytest.mark.ci
@posix_only
def test_an_interrupted_build_leaves_nothing_behind(cache, tmp_path):
    process = start_process(CXX=fake_compiler(tmp_path / "slow", "exec sleep 60"))
    assert "compiling" in process.stderr.readline()
    give_up = time.monotonic() + 60
    while not kept(cache) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert kept(cache), "the build folder lies in the cache, so that the finished library can be moved in one step"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert kept(cache) == [], "Ctrl-C in mid-build must leave no half-built library"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_every_source_is_accepted_with_the_best_flags(compiler, tmp_path, source):
    """A mistake in what only newer processors compile would go unseen: the build would fall back to slower flags."""
    check = [compiler, *native_build.BASE_FLAGS, *native_build.FLAG_SETS[0], "-fsyntax-only"]
    (tmp_path / "empty.cpp").touch()
    if subprocess.run([*check, str(tmp_path / "empty.cpp")], capture_output=True).returncode:
        pytest.skip("NOT CHECKED: this compiler does not know the flags")
    done = subprocess.run([*check, str(source)], capture_output=True, encoding="utf-8")
    assert not done.returncode, done.stderr[:2000]
