"""Lesson 0. Broken checkpoints: each is refused in one sentence that names place and value, with exit code 2."""

import codecs
import json
import math
import shutil
import time

from scripts import l0_smoke

import pytest
import torch
from safetensors.torch import load_file

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.directory import resolve_checkpoint
from mini_engine.families.qwen3 import load_model
from tests.l0.edits import GONE, edit_config, edit_tensors
from tests.support import refused

INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000
NORM = "model.norm.weight"


def config(**changes):
    """Change config.json; None takes a key away."""
    changes = {name: GONE if value is None else value for name, value in changes.items()}
    return lambda directory: edit_config(directory, **changes)


def rope(**settings):
    return config(rope_scaling={"factor": 4.0} | settings)


def file(name, text):
    return lambda directory: (directory / name).write_text(text, encoding="utf-8")


def generation(value):
    return file("generation_config.json", json.dumps({"eos_token_id": value}))


def tensors(change):
    return lambda directory: edit_tensors(directory, change)


def spoiled(name, value):
    return tensors(lambda held: held[name].view(-1).__setitem__(5, value))


def shard(place):
    """Replace the single file by an index that puts one tensor into `place`."""

    def change(directory):
        names = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        places = dict.fromkeys(names, "a.safetensors") | {NORM: place}
        (directory / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")

    return change


def with_bom(name):
    """PowerShell 5 puts a byte order mark at the beginning of what it writes as UTF-8."""

    def change(directory):
        path = directory / name
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())

    return change


def header(change, in_shard=False):
    """Change the header of the safetensors file: a JSON object behind its length. `change` may return other bytes."""

    def rewrite(directory):
        if in_shard:
            shard("a.safetensors")(directory)
        path = directory / ("a.safetensors" if in_shard else "model.safetensors")
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:end])
        changed = change(entries)
        text = json.dumps(entries).encode() if changed is None else changed
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return rewrite


def cut(keep):
    """Keep the first bytes of the safetensors file alone."""

    def change(directory):
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])

    return change


def raw(directory, at, data):
    """Overwrite some bytes of the safetensors file."""
    path = directory / "model.safetensors"
    held = bytearray(path.read_bytes())
    held[at : at + len(data)] = data
    path.write_bytes(held)


def tensor(name, **changes):
    return header(lambda entries: entries[name].update(changes))


# what is broken: (how, words that the sentence must have)
NUMBERS = {
    "rope_theta 0": (config(rope_parameters=None, rope_theta=0), ["rope_theta = 0"]),
    "rope_theta -1": (config(rope_parameters={"rope_theta": -1}), ["rope_parameters.rope_theta = -1"]),
    "rope_theta NaN": (config(rope_parameters={"rope_theta": math.nan}), ["rope_theta = nan"]),
    "rope_theta text": (config(rope_parameters=None, rope_theta="x"), ["rope_theta = 'x'"]),
    "rms_norm_eps -1": (config(rms_norm_eps=-1), ["rms_norm_eps = -1"]),
    "rms_norm_eps NaN": (config(rms_norm_eps=math.nan), ["rms_norm_eps = nan"]),
    "rms_norm_eps text": (config(rms_norm_eps="1e-6"), ["rms_norm_eps = '1e-6'"]),
    "vocab_size 2^62": (config(vocab_size=2**62), ["vocab_size = 4611686018427387904"]),
    "hidden_size 2^63": (config(hidden_size=2**63), ["hidden_size = 9223372036854775808"]),
    "a million layers": (config(num_hidden_layers=10**6), ["num_hidden_layers = 1000000", "2"]),
    "every size at its limit": (config(num_attention_heads=2**16, head_dim=2**16), ["model."]),
    "no hidden_size": (config(hidden_size=None), ["hidden_size"]),
    "no layers": (config(num_hidden_layers=0), ["num_hidden_layers = 0"]),
    "four heads of three": (config(num_key_value_heads=3), ["4", "3"]),
    "an odd head": (config(head_dim=15), ["head_dim = 15"]),
    "tie_word_embeddings text": (config(tie_word_embeddings="x"), ["tie_word_embeddings = 'x'"]),
}
ROPES = {
    "rope_scaling text": (config(rope_scaling="yarn"), ["rope_scaling = 'yarn'"]),
    "rope_parameters list": (config(rope_parameters=[1, 2]), ["rope_parameters = [1, 2]"]),
    "rope by layer": (config(rope_parameters={"full_attention": {"rope_theta": 1e4}}), ["'full_attention'"]),
    "longrope": (rope(rope_type="longrope", short_factor=[1.0], long_factor=[1.0]), ["'longrope'", "yarn"]),
    "rope_type list": (rope(rope_type=[1]), ["[1]"]),
    "no factor": (config(rope_scaling={"rope_type": "yarn"}), ["rope_scaling.factor"]),
    "factor text": (rope(rope_type="linear", factor="x"), ["rope_scaling.factor = 'x'"]),
    "factor 0": (rope(rope_type="yarn", factor=0), ["rope_scaling.factor = 0"]),
    "attention_factor huge": (rope(rope_type="yarn", attention_factor=1e300), ["attention_factor = 1e+300"]),
    "length 1.5": (rope(type="yarn", original_max_position_embeddings=1.5), ["original_max_position_embeddings = 1.5"]),
    "truncate text": (rope(rope_type="yarn", truncate="x"), ["truncate = 'x'"]),
    "llama3 without bands": (rope(rope_type="llama3"), ["low_freq_factor, rope_scaling.high_freq_factor"]),
    "half a head": (config(partial_rotary_factor=0.5), ["partial_rotary_factor = 0.5"]),
}
OTHER_MODELS = {
    "quantized": (config(quantization_config={"quant_method": "fp8"}), ["quantization_config", "fetch"]),
    "sliding layers": (config(layer_types=["full_attention", "sliding_attention"]), ["'sliding_attention'"]),
    "sliding window": (
        config(layer_types=None, sliding_window=None, use_sliding_window=True, max_window_layers=1),
        ["sliding_attention"],
    ),
    "another family": (config(model_type="nobody's"), ["nobody's"]),
    "another activation": (config(hidden_act="gelu"), ["'gelu'"]),
    "layer_types 5": (config(layer_types=5), ["layer_types = 5"]),
}
END_TOKENS = {
    f"eos_token_id {value!r} in {place}": (how, [f"eos_token_id = {value!r}", place])
    for value in ("zz", ["x"], {"a": 1}, "2", True, 1.5)
    for place, how in (("/config.json", config(eos_token_id=value)), ("generation_config.json", generation(value)))
}
FILES = {
    "deep config": (file("config.json", DEEP), ["config.json"]),
    "deep generation_config": (file("generation_config.json", DEEP), ["generation_config.json"]),
    "a config that is no JSON": (file("config.json", "{"), ["config.json"]),
    "a config that is a list": (file("config.json", "[]"), ["list"]),
    "shard 5": (shard(5), ["weight_map.model.norm.weight = 5"]),
    "shard list": (shard([1]), ["weight_map.model.norm.weight = [1]"]),
    "shard with a long name": (shard("x" * 5000), ["weight_map.model.norm.weight = 'xxx"]),
    "shard above": (shard("../a.safetensors"), ["'../a.safetensors'", "outside"]),
    "shard at the root": (shard("/etc/a.safetensors"), ["'/etc/a.safetensors'", "outside"]),
    "shard on a drive": (shard("C:\\a.safetensors"), ["outside"]),
    "shard on another share": (shard("..\\a.safetensors"), ["outside"]),
    "GGUF": (lambda d: (d / "model.safetensors").rename(d / "model-q4.gguf"), ["neither", "GGUF", "fetch"]),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ["model.safetensors"]),
    "an index without a map": (lambda d: (shard("a")(d), file(INDEX, "{}")(d)), ["weight_map"]),
    "a shard that is not there": (shard("b.safetensors"), ["b.safetensors"]),
    "a tensor that no shard has": (
        lambda d: (tensors(lambda held: held.pop(NORM))(d), shard("a.safetensors")(d)),
        [NORM],
    ),
    "weight_map list": (lambda d: (shard("a")(d), file(INDEX, '{"weight_map": [1]}')(d)), ["weight_map = [1]"]),
}
MARKS = {f"a BOM in {name}": (with_bom(name), [name]) for name in ("config.json", "generation_config.json")} | {
    "a BOM in the index": (lambda d: (shard("a.safetensors")(d), with_bom(INDEX)(d)), [INDEX])
}
HEADERS = {
    **{f"only {keep} bytes": (cut(keep), ["model.safetensors"]) for keep in (0, 4, 100, -1000)},
    "cut off": (header(lambda entries: json.dumps(entries).encode()[:-9]), ["model.safetensors"]),
    "cut off in a shard": (header(lambda entries: json.dumps(entries).encode()[:-9], in_shard=True), ["a.safetensors"]),
    "longer than the file": (lambda d: raw(d, 0, (2**40).to_bytes(8, "little")), ["model.safetensors"]),
    "longer than any": (lambda d: raw(d, 0, b"\xff" * 8), ["model.safetensors"]),
    "no object": (header(lambda entries: b"[1, 2]"), ["model.safetensors"]),
    "no UTF-8": (header(lambda entries: b"\xff" * 64), ["model.safetensors"]),
    "beyond the data": (tensor(NORM, data_offsets=[0, 2**40]), ["model.safetensors"]),
    "backwards": (tensor(NORM, data_offsets=[192, 0]), ["model.safetensors"]),
    "another shape": (tensor(NORM, shape=[49]), ["model.safetensors"]),
    "a dtype of its own": (tensor(NORM, dtype="F128"), ["model.safetensors"]),
    "a pointer of Git LFS": (file("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), ["model.safe"]),
}
WEIGHTS = {
    "NaN in a norm": (spoiled(NORM, math.nan), [NORM]),
    "Inf in a matrix": (spoiled("model.layers.1.mlp.up_proj.weight", math.inf), ["layers.1.mlp.up_proj.weight"]),
    "both infinities": (spoiled("lm_head.weight", -math.inf), ["lm_head.weight"]),
    "misshapen": (tensors(lambda t: t.update({NORM: torch.zeros(47)})), [NORM, "[47]", "[48]"]),
    "int8": (tensors(lambda t: t.update({NORM: torch.ones(48, dtype=torch.int8)})), ["I8"]),
}
HEADERS = {f"a header: {case}": how for case, how in HEADERS.items()}
CASES = NUMBERS | ROPES | OTHER_MODELS | END_TOKENS | FILES | MARKS | HEADERS | WEIGHTS


@pytest.mark.parametrize("case", CASES)
def test_a_broken_checkpoint_is_refused_in_one_sentence(base, tmp_path, capsys, case):
    directory = tmp_path / "model"
    shutil.copytree(base, directory)
    change, words = CASES[case]
    change(directory)
    started = time.process_time()
    code = l0_smoke.main(["--model", str(directory), "--prompt-ids", "1,2,3", "--max-new-tokens", "2"])
    out, err = capsys.readouterr()
    assert code == 2 and out == "", f"{case}: exit code {code}, and it printed {out!r}"
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1 and len(lines[0]) < 600, f"{case}: one sentence is enough: {err}"
    assert all(word.lower() in lines[0].lower() for word in words), (
        f"{case}: the sentence must name {words}: {lines[0]}"
    )
    assert time.process_time() - started < 20, f"{case}: a model of this size must not be made"


@pytest.mark.parametrize(
    "changes",
    [
        dict(use_sliding_window=True),  # layer_types says that no layer slides
        dict(layer_types=None, sliding_window=None, use_sliding_window=True, max_window_layers=2),
        dict(layer_types=None, use_sliding_window=False, sliding_window=16, max_window_layers=0),
        dict(torch_dtype="bfloat16", some_day=[1, {"a": None}]),
    ],
)
def test_settings_without_effect_are_no_mistake(base, tmp_path, changes):
    shutil.copytree(base, tmp_path / "model")
    config(**changes)(tmp_path / "model")
    assert load_model(tmp_path / "model").config == load_model(base).config


def test_large_weights_are_no_damage(base, tmp_path):
    shutil.copytree(base, tmp_path / "model")
    tensors(lambda held: held[NORM].fill_(3e38))(tmp_path / "model")
    load_model(tmp_path / "model")  # their sum is infinite, and each of them is finite


def test_weights_too_large_for_the_dtype_are_refused(base, tmp_path):
    shutil.copytree(base, tmp_path / "model")
    tensors(lambda held: held[NORM].fill_(1e5))(tmp_path / "model")
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        load_model(tmp_path / "model", torch.float16)


@pytest.mark.parametrize("model", ["m" * 5000, "a/" + "m" * 5000, "a\0b", 5, "", " "])
def test_a_name_that_no_directory_can_have(model):
    with pytest.raises(UserError) as caught:
        resolve_checkpoint(model)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_a_place_that_is_no_checkpoint(base, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    places = {tmp_path / "nowhere": "nowhere", base / "config.json": "config.json", tmp_path: "config.json"}
    for place, values in (places | {"nobody/nothing-here": "nobody/nothing-here"}).items():
        with refused(UserError, values):
            load_model(place)


def test_a_gguf_file_is_refused_with_what_to_fetch_instead(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UserError, match=r"GGUF.*fetch the checkpoint"):
        resolve_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("name, text", [("tokenizer.json", '{"version": "1.0", "trunc'), ("tokenizer.json", "{}")])
def test_a_damaged_tokenizer_is_one_sentence(base, tmp_path, capsys, name, text):
    shutil.copytree(base, tmp_path / "model")
    (tmp_path / "model" / name).write_text(text, encoding="utf-8")
    code = l0_smoke.main(["--model", str(tmp_path / "model"), "--prompt", "hello"])
    err = capsys.readouterr().err.strip()
    assert code == 2 and len(err.splitlines()) == 1 and "tokenizer" in err, err
