"""Lesson 9. The smoke script: every backend equals Hugging Face, and is left out only where it cannot run."""

import json
import os
from types import SimpleNamespace

from scripts import l9_smoke

import pytest
import torch

from mini_engine.attention import cpu
from mini_engine.base.errors import UserError
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


def test_an_error_within_a_backend_is_an_error(capsys, monkeypatch):
    def refuse(model, backend):
        raise UserError("this model cannot be made fast")

    monkeypatch.setattr(l9_smoke, "speed_up", refuse)
    code, report, err = smoke(capsys)
    assert code == 2 and report is None and "this model cannot be made fast" in err


def test_other_tokens_fail_and_the_backend_is_named(capsys, monkeypatch):
    real = l9_smoke.speed_up

    def harmed(model, backend):
        model = real(model, backend)
        model.model.norm.weight.data.neg_()
        return model

    monkeypatch.setattr(l9_smoke, "speed_up", harmed)
    code, report, _ = smoke(capsys)
    assert code == 1 and not report["match"]
    assert report["kv"]["equal"]["reference"] == 2
    assert any("torch: answers [0, 1] differ" in fault for fault in report["faults"]), report["faults"]


def test_a_request_that_ends_with_an_error_fails_whatever_the_dtype(capsys, monkeypatch):
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError("the head is gone")

    real = l9_smoke.speed_up

    def harmed(model, backend):
        model = real(model, backend)
        model.lm_head = Broken()
        return model

    monkeypatch.setattr(l9_smoke, "speed_up", harmed)
    code, report, _ = smoke(capsys, "--dtype", "bfloat16")
    assert code == 1 and any("ended with an error" in fault for fault in report["faults"])


def test_on_a_gpu_both_fast_backends_are_left_out():
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    for backend in l9_smoke.BACKENDS:
        assert "on cuda" in l9_smoke.why_not(backend, model)


def test_float16_has_no_packed_layers():
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float16)
    assert "float32 and bfloat16" in l9_smoke.why_not("packed", model) and l9_smoke.why_not("torch", model) is None


@pytest.mark.parametrize("arguments, words", [(["--block-size", "0"], "0 is too small"), (["--fast"], "--fast")])
def test_bad_arguments_exit_2_with_one_line(capsys, arguments, words):
    code, _, err = smoke(capsys, *arguments)
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1, err
