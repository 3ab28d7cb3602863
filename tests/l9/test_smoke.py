"""Lesson 9. The smoke script: every backend equals Hugging Face, and is left out only where it cannot run."""

import json
import os

from scripts import l9_smoke

import pytest

from mini_engine.attention import cpu
from mini_engine.layers import native
from tests.l9.test_fast_model import needs_compiler
from tests.support import checkpoint, forget_builds

ALL = {"reference", "torch", "packed"}
PROMPTS = ["--prompt-ids", "1,2,3", "--prompt-ids", "5,6,7,8,9"]


def smoke(capsys, *arguments):
    """Run the smoke script; return exit code, report (None if there is none) and stderr."""
    given = ["--model", str(checkpoint("two, tied, wide heads")), *PROMPTS, "--max-new-tokens", "6", "--json"]
    try:
        code = l9_smoke.main([*given, *arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return a function that sets CXX, with nothing built and nothing cached."""

    def use(command):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("CXX", command)
        forget()

    yield use
    monkeypatch.undo()
    forget()


def forget():
    forget_builds(native.LIBRARY, cpu.LIBRARY)


@needs_compiler
def test_every_backend_equals_hugging_face(capsys):
    code, report, _ = smoke(capsys)
    assert code == 0 and report["match"] and report["kv"]["left_out"] == {}
    assert report["kv"]["equal"] == dict.fromkeys(ALL, 2), "both answers of every backend must be Hugging Face's"


def test_without_a_compiler_packed_weights_are_left_out_and_the_others_run(capsys, compiler):
    compiler("no-such-compiler")
    code, report, _ = smoke(capsys)
    assert code == 0 and set(report["kv"]["equal"]) == ALL - {"packed"}
    assert "no-such-compiler" in report["kv"]["left_out"]["packed"], "the report must say why"


@pytest.mark.skipif(os.name == "nt", reason="the broken compiler is a shell script")
def test_a_compiler_that_fails_is_an_error_and_not_left_out(capsys, compiler, tmp_path):
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho this source is wrong >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    compiler(str(broken))
    code, report, err = smoke(capsys)
    assert code == 2 and report is None, "a backend that fails must not be left out"
    assert "this source is wrong" in err.strip().splitlines()[-1], f"the error must quote the compiler: {err}"
