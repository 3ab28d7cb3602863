"""Lesson 10. The defaults on a GPU: fused layers and captured steps, and a way back if either does not work."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from mini_engine.assembly import build, choices
from mini_engine.assembly.llm import LLM
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.cli.arguments import add_engine_options
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import load_model
from mini_engine.gpu import graphs as graphs_module
from mini_engine.gpu.graphs import GraphRunner, runner_for
from mini_engine.kv.block_tensor import KvPool
from mini_engine.layers import fused_layers
from tests.support import checkpoint

FAMILY = "two, tied, wide heads"


@pytest.fixture
def asked(monkeypatch):
    """Note for which runners captured steps are asked."""
    found = []

    def note(eager, max_rows, extras):
        found.append(max_rows)
        return eager

    monkeypatch.setattr(graphs_module, "runner_for", note)
    monkeypatch.setattr(KvPool, "device", torch.device("cuda"))  # nothing runs there
    return found


@pytest.mark.parametrize("option, asks", [({}, True), ({"cuda_graphs": False}, False)])
def test_steps_are_captured_unless_that_is_turned_off(asked, option, asks):
    build.build_engine(load_model(checkpoint(FAMILY)), backend="reference", num_blocks=8, **option)
    assert bool(asked) == asks


@pytest.mark.parametrize("words, value", [([], None), (["--cuda-graphs"], True), (["--no-cuda-graphs"], False)])
def test_the_commands_have_a_switch(words, value):
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    assert parser.parse_args(words).cuda_graphs is value


def fails(*arguments):
    try:
        raise RuntimeError("CUDA error: out\nof something")
    finally:
        raise RuntimeError("the capture was invalidated")  # as torch.cuda.graph does at its end


def test_a_capture_that_fails_is_one_sentence_and_steps_are_launched(monkeypatch, capsys):
    monkeypatch.setattr(graphs_module, "CudaCapture", fails)
    pool = SimpleNamespace(device=torch.device("cuda"), kernel=SimpleNamespace(recordable=True), K=[torch.zeros(1, 4)])
    eager = SimpleNamespace(pool=pool)
    assert runner_for(eager, 8) is eager
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "CUDA error: out of something" in err and "--no-cuda-graphs" in err, err


# Which layers


def on_a_gpu():
    return SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(model_type="qwen3"))


def test_a_gpu_gets_fused_layers(monkeypatch):
    monkeypatch.setattr(fused_layers, "fuse", lambda model: ("fused", model))
    model = on_a_gpu()
    assert choices.with_layers(model, "auto") == choices.with_layers(model, "fused") == ("fused", model)
    assert choices.with_layers(model, "reference") is model


def test_without_working_kernels_auto_keeps_the_model_and_fused_is_refused(monkeypatch, capsys):
    def refuse(model):
        raise UserError("there is no Triton here")

    monkeypatch.setattr(fused_layers, "fuse", refuse)
    model = on_a_gpu()
    assert choices.with_layers(model, "auto") is model
    assert len(capsys.readouterr().err.splitlines()) == 1, "say in one line what is used instead"
    with pytest.raises(UserError):
        choices.with_layers(model, "fused")


def test_fused_layers_are_refused_on_a_cpu():
    with pytest.raises(UserError):
        build.build_engine(load_model(checkpoint(FAMILY)), backend="fused", num_blocks=8)


# On a GPU


@pytest.mark.gpu
def test_a_gpu_gets_both_by_default():
    assert load_kernel("auto", "cuda", torch.float32).name == "triton"
    greedy, prompts = SamplingParams(temperature=0, max_tokens=24), ["The capital of France is", "Once upon a time"]
    with LLM(device="cuda", dtype="float32") as llm:
        assert isinstance(llm.engine.runner, GraphRunner)
        assert isinstance(llm.engine.runner.model.model, fused_layers.FusedModel)
        got = [answer.token_ids for answer in llm.generate(prompts, greedy)]
    with LLM(device="cpu", backend="reference") as llm:
        assert [answer.token_ids for answer in llm.generate(prompts, greedy)] == got
