"""Lesson 0. The smoke script's contract: exit codes, one line for bad input, the JSON object."""

import json

from scripts import l0_smoke

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_engine.families import qwen3
from mini_engine.families.qwen3 import load_model
from tests.support import checkpoint, write_checkpoint

FAMILY = "two, tied, wide heads"
FIELDS = {"lesson", "model", "dtype", "device", "match", "requests", "kv", "seconds", "faults", "not_exercised"}


def smoke(*arguments, module=l0_smoke):
    """Return the script's exit code. It runs in this process, so that a student's module is the one in use."""
    try:
        return module.main([str(a) for a in arguments])
    except SystemExit as stop:
        return stop.code


def test_json_is_one_object_with_the_agreed_fields(capsys):
    smoke("--model", checkpoint(FAMILY), "--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--json")
    report = json.loads(capsys.readouterr().out)
    assert set(report) == FIELDS
    assert set(report["requests"][0]) == {"prompt_ids", "ours", "hf", "match", "first_divergence"}
    assert set(report["seconds"]) == {"load", "ours", "hf"}
    assert report["match"] and report["lesson"] == 0 and len(report["requests"][0]["ours"]) == 5


def test_a_perturbed_weight_exits_1_and_names_the_place(capsys, tmp_path):
    other = write_checkpoint(tmp_path, num_key_value_heads=2, head_dim=40, tie_word_embeddings=True)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][:8] += 0.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    code = smoke("--model", checkpoint(FAMILY), "--hf-model", other, "--prompt-ids", "1,2,3", "--json")
    assert code == 1, "a changed weight must be reported"
    divergence = json.loads(capsys.readouterr().out)["requests"][0]["first_divergence"]
    assert divergence["expected"] != divergence["got"]
    assert divergence["gap"] >= 0
    assert "layer 1, after the MLP" in divergence["where"], divergence["where"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "no/such/dir", "--prompt-ids", "1"], "there is no directory no/such/dir"),
        (["--prompt-ids", "1,160"], "token id 160"),
        (["--prompt-ids", "1,x"], "'1,x' is not a list of token ids"),
        (["--prompt", "hello"], "has no tokenizer; give --prompt-ids"),
        (["--prompt-ids", "1", "--max-new-tokens", "3000"], "the model has 2048"),
        (["--prompt-ids", "1", "--max-new-tokens", "0"], "it must be 1 or more"),
        (["--prompt-ids", "1", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_input_exits_2_with_one_line(capsys, arguments, words):
    assert smoke("--model", checkpoint(FAMILY), *arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert len(streams.err.strip().splitlines()) == 1 and words in streams.err, streams.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT CHECKED: this machine has a CUDA device")
def test_a_missing_gpu_exits_2(capsys):
    assert smoke("--model", checkpoint(FAMILY), "--prompt-ids", "1", "--device", "cuda") == 2
    assert "use --device cpu" in capsys.readouterr().err


def test_bfloat16_runs_and_reports(capsys, monkeypatch):
    loaded = []
    monkeypatch.setattr(qwen3, "load_model", lambda *given: loaded.append(load_model(*given)) or loaded[-1])
    code = smoke("--model", checkpoint(FAMILY), "--prompt-ids", "1,2,3", "--dtype", "bfloat16", "--json")
    request = json.loads(capsys.readouterr().out)["requests"][0]
    assert loaded[0].dtype == torch.bfloat16, "--dtype sets the dtype of the weights"
    assert code == (0 if request["match"] else 1)
    assert request["match"] == (request["first_divergence"] is None)
