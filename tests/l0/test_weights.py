"""Lesson 0. Loading: heads, stale shards, dtypes, end tokens, and how much memory it takes."""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from mini_engine.base.errors import UserError
from mini_engine.families.qwen3 import load_model
from tests.l0.edits import edit_config, edit_tensors
from tests.support import refused, write_checkpoint


@pytest.fixture
def untied(tmp_path):
    return write_checkpoint(tmp_path / "model")


def test_a_head_that_differs_from_the_embedding_is_used_though_the_config_ties_it(tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    directory = write_checkpoint(tmp_path, tie_word_embeddings=True)
    head = torch.randn(160, 48, generator=torch.Generator().manual_seed(0))
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": head}))
    capsys.readouterr()
    ours = load_model(directory)
    assert capsys.readouterr().err.count("\n") == 1, "one line of warning"
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, head), "transformers has changed: it used to trust the file"
    assert torch.equal(ours.head_weight, head) and not torch.equal(ours.model.embed_tokens.weight, head)


def test_a_single_file_beats_an_index_beside_it(tmp_path):
    from transformers import AutoModelForCausalLM

    directory = write_checkpoint(tmp_path / "model", shard_size="40KB")  # the stale shards are of another seed
    single = write_checkpoint(tmp_path / "single", seed=1) / "model.safetensors"
    shutil.copy(single, directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).model.norm.weight
    assert torch.equal(theirs, load_file(single)["model.norm.weight"]), "transformers has changed"
    assert torch.equal(load_model(directory).model.norm.weight, theirs)


def test_a_dtype_is_converted_on_the_way(untied):
    half = load_model(untied, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    full = load_model(untied)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(half.parameters(), full.parameters(), strict=True))


@pytest.mark.parametrize(
    "place, values",
    [
        (dict(dtype="bfloat16"), "dtype 'bfloat16' torch.float32"),
        (dict(dtype=torch.int8), "dtype torch.int8"),
        (dict(device="gpu"), "device 'gpu'"),
        (dict(device=f"cuda:{torch.cuda.device_count()}"), "device cuda"),
    ],
)
def test_an_unusable_dtype_or_device_is_refused_before_anything_is_read(tmp_path, place, values):
    with refused(UserError, values):
        load_model(tmp_path / "nowhere", **place)


@pytest.mark.parametrize("value, ids", [(999, ()), ([999, 7], (7,)), ([-1, 7, 160], (7,)), (159, (159,))])
def test_an_end_token_outside_the_vocabulary_never_comes(untied, capsys, value, ids):
    edit_config(untied, eos_token_id=value)
    (untied / "generation_config.json").unlink()
    assert load_model(untied).config.eos_token_ids == load_model(untied).config.eos_token_ids == ids
    said = [line for line in capsys.readouterr().err.splitlines() if "eos_token_id" in line]
    assert len(said) == (ids != (159,)), f"one line of warning however often it is loaded: {said}"


@pytest.mark.parametrize(
    "generation, ids", [({}, ()), ({"eos_token_id": None}, ()), ({"eos_token_id": [9, 5]}, (9, 5))]
)
def test_a_generation_config_replaces_the_end_tokens_even_if_it_names_none(untied, capsys, generation, ids):
    from transformers import AutoModelForCausalLM

    edit_config(untied, eos_token_id=7)
    (untied / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    theirs = AutoModelForCausalLM.from_pretrained(untied).generation_config.eos_token_id
    assert theirs == (list(ids) or None), "transformers has changed: what does its generate stop at?"
    assert load_model(untied).config.eos_token_ids == ids
    assert ("eos_token_id" in capsys.readouterr().err) == (not ids)


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="NOT CHECKED: the peak is read from Linux's /proc")
def test_the_peak_is_at_most_a_fifth_above_the_model(tmp_path, untied):
    write_checkpoint(
        tmp_path / "large", vocab_size=60_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4
    )
    script = """
        import sys
        from pathlib import Path
        import torch
        from mini_engine.families.qwen3 import load_model
        def peak(name):
            status = Path("/proc/self/status").read_text(encoding="utf-8")
            return int(status.split(name + ":")[1].split()[0]) * 1024
        load_model(sys.argv[2])  # a small one first, so that code loaded on first use does not count
        before = peak("VmRSS")
        model = load_model(sys.argv[1])
        size = sum(p.nbytes for p in model.parameters())
        print((peak("VmHWM") - before) / size)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "large"), str(untied)],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    ratio = float(done.stdout)
    assert 0.5 < ratio <= 1.2, f"loading peaked at {ratio:.2f} times the model's own size; at most 1.2 is allowed"
