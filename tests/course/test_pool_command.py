"""Course machinery. `mini-engine pool`: models that this engine does not run, mistakes, and what is printed.

tests/families/test_pool.py compares its figures with engines.
"""

import json
import os
import subprocess
import sys

import pytest

from mini_engine.__main__ import main
from mini_engine.model.kinds import FULL, SLIDING
from tests.support import ran

MOE = dict(model_type="qwen3_moe", num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
MLA = dict(model_type="deepseek_v2", num_hidden_layers=27, num_attention_heads=16, kv_lora_rank=512)
GEMMA = dict(model_type="gemma3_text", num_hidden_layers=34, sliding_window=1024)
NETS = dict(model_type="qwen3_next", num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=2)
NETS |= dict(linear_num_key_heads=16, linear_num_value_heads=32)
QWEN = dict(model_type="qwen3", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
QWEN |= dict(vocab_size=100, hidden_size=64, intermediate_size=64)
OSS = dict(model_type="gpt_oss", num_hidden_layers=4, num_attention_heads=64)
OLMO = dict(model_type="olmo3", num_hidden_layers=3, num_attention_heads=4, hidden_size=64)
OLMO |= dict(layer_types=[FULL, SLIDING, FULL])
MIB = 2**20


def run(capsys, tmp_path, config, *options):
    """Return what the command returns and prints for this config.json."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ran(main, "pool", tmp_path, *options, capsys=capsys)


@pytest.mark.parametrize(
    ("config", "per_token", "kinds"),
    [
        pytest.param(MOE, 48 * 2 * 4 * 128 * 2, {"full": 48}, id="experts"),
        pytest.param(MLA | dict(qk_rope_head_dim=64), 27 * 576 * 2, {"latent": 27}, id="latents"),
        pytest.param(
            dict(model_type="gemma3", text_config=GEMMA), 5 * 2 * 4 * 256 * 2, {"full": 5, "window": 29}, id="tower"
        ),
        pytest.param(NETS, 12 * 2 * 2 * 256 * 2, {"full": 12, "state": 36}, id="delta nets"),
        pytest.param(QWEN | dict(quantization_config={"bits": 4}), 2 * 2 * 2 * 64 * 2, {"full": 2}, id="quantized"),
        pytest.param(OSS, 2 * 2 * 8 * 64 * 2, {"full": 2, "window": 2}, id="every other layer has a window"),
        pytest.param(OLMO, 2 * 2 * 4 * 16 * 2, {"full": 2, "window": 1}, id="a list of layers"),
    ],
)
def test_a_model_that_does_not_run_here_is_answered_by_its_config(capsys, tmp_path, config, per_token, kinds):
    code, out, err = run(capsys, tmp_path, config, "--json")
    found = json.loads(out)
    assert (code, err, found["runs"]) == (0, "", False) and found["why"]
    assert found["bytes_per_token"] == per_token and found["weight_bytes"] is None
    assert {layer["kind"]: layer["layers"] for layer in found["layers"]} == kinds
    assert "by config: this engine does not run it" in run(capsys, tmp_path, config)[1]


def test_a_hybrid_s_states_are_fixed(capsys, tmp_path):
    found = json.loads(run(capsys, tmp_path, NETS, "--json", "--tokens", "16")[1])
    states = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert found["fixed_bytes"] == states and found["requests"][0]["bytes"] == states + 16 * found["bytes_per_token"]


def test_room_that_windows_leave_empty_is_counted_and_said(capsys, tmp_path):
    """Six groups of five for 29 layers: one tensor of the last group's blocks has no layer."""
    config = dict(model_type="gemma3", text_config=GEMMA)
    full, window = json.loads(run(capsys, tmp_path, config, "--json")[1])["layers"]
    assert window["bytes_per_token"] == 6 * full["bytes_per_token"] and 5 * window["unused"] == full["bytes_per_token"]
    assert window["fixed_bytes"] == 6 * 65 * 16 * full["bytes_per_token"], "1,023 tokens lie in at most 65 blocks"
    assert f"{window['unused']:,} bytes" in run(capsys, tmp_path, config)[1]


def test_of_a_model_with_windows_alone_the_first_layer_is_kept_whole(capsys, tmp_path):
    config = QWEN | dict(model_type="mistral", num_hidden_layers=5, sliding_window=64)
    found = json.loads(run(capsys, tmp_path, config, "--json")[1])
    assert [(layer["kind"], layer["layers"]) for layer in found["layers"]] == [("full", 1), ("window", 4)]
    assert found["first_layer_keeps_all"] and "kept whole" in run(capsys, tmp_path, config)[1]


@pytest.mark.parametrize(
    ("options", "per_token"),
    [
        (["--kv-dtype", "int4"], 8 * (32 + 2 * 4)),
        (["--kv-dtype", "int8"], 8 * (64 + 4)),
        (["--dtype", "float32"], 2048),
    ],
)
def test_the_dtypes_count(capsys, tmp_path, options, per_token):
    """Eight vectors of 64 numbers a token; int4 has a step and a least for each 32, int8 one scale."""
    found = json.loads(run(capsys, tmp_path, QWEN, "--json", *options)[1])
    assert found["bytes_per_token"] == per_token


def test_a_request_holds_whole_blocks(capsys, tmp_path):
    found = json.loads(run(capsys, tmp_path, QWEN, "--json", "--tokens", "33", "--block-size", "32")[1])
    assert found["requests"][0]["bytes"] == 64 * found["bytes_per_token"]


def test_weights_leave_less_memory_for_kv(capsys, tmp_path):
    options = ("--json", "--tokens", "64", "--memory", "8MiB")
    before, after = (json.loads(run(capsys, tmp_path, QWEN, *options, *more)[1]) for more in ((), ("--after-weights",)))
    assert before["memory_for_kv"] == 8 * MIB and after["memory_for_kv"] == 8 * MIB - before["weight_bytes"]
    assert after["requests"][0]["at_once"] < before["requests"][0]["at_once"]


@pytest.mark.parametrize(
    ("config", "options", "values"),
    [
        (dict(model_type="mamba2"), [], "config.json 'mamba2'"),
        ([1], [], "config.json list"),
        (MLA, [], "config.json qk_rope_head_dim"),
        (MOE | dict(num_key_value_heads=0), [], "num_key_value_heads = 0"),
        (OSS | dict(layer_types=["linear"] * 4), [], "layer_types 'linear'"),
        (OSS | dict(layer_types=[FULL]), [], "1 layer_types 4"),
        (MOE | dict(head_dim=None), [], "head_dim hidden_size 32"),
        (MOE, ["--after-weights"], "--after-weights"),
        (QWEN, ["--after-weights", "--memory", "10KiB"], "--memory 10.0"),
        (QWEN, ["--memory", "much"], "--memory 'much'"),
        (QWEN, ["--tokens", "0"], "--tokens 0"),
        (QWEN, ["--kv-dtype", "int2"], "--kv-dtype 'int2'"),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, config, options, values):
    code, out, err = run(capsys, tmp_path, config, *options)
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1, err
    assert all(value in err for value in values.split()), err


@pytest.mark.parametrize("place", ["no/such/place", "no-such-place"])
def test_a_place_without_a_config_is_one_line(capsys, monkeypatch, place):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["pool", place]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.ci
def test_lines_fit_80_columns_and_a_pipe_has_no_colours(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="gemma3", text_config=GEMMA)), encoding="utf-8")
    command = [sys.executable, "-m", "mini_engine", "pool", "config.json"]
    plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    root = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=plain | root, capture_output=True, encoding="utf-8", check=True)
    assert max(map(len, done.stdout.splitlines())) <= 80 and "\x1b" not in done.stdout
