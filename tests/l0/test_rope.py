"""Lesson 0. RoPE's scalings: frequencies equal Hugging Face's bit for bit, and tokens beyond the trained context."""

import shutil

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.engine.loop import generate
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.no_cache import NoCache, NoCacheMeta, Recompute
from tests.l0.edits import GONE, edit_config
from tests.support import hf_greedy, some_ids

TRAINED, THETA = 32, 10_000.0
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def new(**rope):
    """The layout of transformers 5."""
    return dict(rope_parameters={"rope_theta": THETA} | rope)


def old(**rope):
    """The layout before it, as users of Qwen3 edit it."""
    return dict(rope_parameters=GONE, rope_theta=THETA, rope_scaling=rope)


# name: changes to config.json. max_position_embeddings is 4 * TRAINED unless a case says otherwise.
CASES = {
    "yarn": new(**YARN),
    "yarn, old layout": old(type="yarn", factor=4.0, original_max_position_embeddings=TRAINED),
    "yarn, both keys": dict(rope_scaling=YARN, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "yarn, both keys and a theta": dict(rope_scaling=YARN, rope_parameters=dict(rope_theta=1.0), rope_theta=1e6),
    "yarn, rope_type before type": old(**YARN, type="linear"),
    "yarn, length at the top level": new(**YARN) | dict(original_max_position_embeddings=50),
    "yarn, no length": dict(max_position_embeddings=TRAINED) | old(rope_type="yarn", factor=4.0),
    "yarn, attention_factor": new(**YARN, attention_factor=1.7),
    "yarn, attn_factor": new(**YARN, attn_factor=0.8782488562869419),  # as in DeepSeek-R1-0528-Qwen3-8B
    "yarn, both factors": new(**YARN, attention_factor=1.7, attn_factor=0.5),
    "yarn, beta": new(**YARN, beta_fast=2.5, beta_slow=0.3),
    "yarn, not truncated": new(**YARN, beta_fast=2.5, beta_slow=0.3, truncate=False),
    "yarn, mscale": new(**YARN, mscale=0.7, mscale_all_dim=1.3),
    "yarn, mscale alone": new(**YARN, mscale=0.7),
    "yarn, a factor below 1": new(**YARN | {"factor": 0.5}),
    "yarn, an integer factor and nulls": new(**YARN | {"factor": 4}, attention_factor=None, mscale=None),
    "linear": new(rope_type="linear", factor=4.0),
    "linear, old layout": dict(max_position_embeddings=TRAINED) | old(type="linear", factor=4.0),
    "llama3": new(**LLAMA3, original_max_position_embeddings=TRAINED),
    "llama3, old layout": old(**LLAMA3, original_max_position_embeddings=TRAINED),
    "dynamic": new(rope_type="dynamic", factor=4.0),
    "an empty rope_scaling": new(rope_type="default") | dict(rope_scaling={}),
    "rope_scaling null": old() | dict(rope_scaling=None),
}


def edited(base, directory, changes):
    """Return a copy of a checkpoint with another config.json."""
    shutil.copytree(base, directory)
    return edit_config(directory, **{"max_position_embeddings": 4 * TRAINED} | changes)


@pytest.mark.parametrize("case", CASES)
def test_frequencies_logits_and_tokens_equal_hugging_face(base, tmp_path, case):
    from transformers import AutoModelForCausalLM

    directory = edited(base, tmp_path / "model", CASES[case])
    ours, hf = load_model(directory), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rope, theirs = ours.model.rope, hf.model.rotary_emb
    assert torch.equal(rope.inv_freq, theirs.inv_freq), f"{case}: the frequencies differ from Hugging Face's"
    assert rope.scale == theirs.attention_scaling, f"{case}: cosine and sine are multiplied by another factor"
    length = 3 * TRAINED  # beyond the trained context, except for "dynamic"
    ids = some_ids(length, ours.config.vocab_size)
    with torch.inference_mode():
        want = hf(torch.tensor([ids])).logits[0]
        got = ours(torch.tensor(ids), NoCache(), NoCacheMeta(torch.arange(length)))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert generate(ours, NoCache(), Recompute(), ids, 6) == hf_greedy(hf, ids, 6), f"{case}: other tokens"


@pytest.mark.parametrize(
    "changes, positions",
    [
        (new(), 128),
        (new(**YARN), 128),
        (dict(max_position_embeddings=TRAINED) | old(rope_type="yarn", factor=8.0), 8 * TRAINED),
        (dict(max_position_embeddings=40) | new(**YARN), 4 * TRAINED),
        (new(rope_type="linear", factor=2.0), 256),
        (new(**LLAMA3, original_max_position_embeddings=TRAINED), 128),
        (new(rope_type="dynamic", factor=4.0), 128),
    ],
)
def test_a_scaling_says_how_long_a_sequence_may_be(base, tmp_path, changes, positions):
    config = load_model(edited(base, tmp_path / "model", changes)).config
    config.check_prompt([1] * (positions - 1), 1)
    with pytest.raises(UserError):
        config.check_prompt([1] * positions, 1)


def test_a_theta_that_rope_scaling_replaces_is_worth_a_warning(base, tmp_path, capsys):
    load_model(edited(base, tmp_path / "model", CASES["yarn, both keys"]))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "rope_theta is 10000" in said, f"one line must say which theta counts: {said!r}"
    load_model(edited(base, tmp_path / "other", new(**YARN)))
    assert capsys.readouterr().err == "", "a config without a contradiction is loaded in silence"


@pytest.mark.parametrize("layout", [new, old])
def test_a_setting_that_rope_does_not_know_is_worth_a_warning(base, tmp_path, capsys, layout):
    load_model(edited(base, tmp_path / "model", layout(**YARN, attn_factor=0.878)))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "attn_factor" in said, "transformers warns of it too, and does not read it"


def test_half_precision_keeps_the_frequencies_in_float32(base, tmp_path):
    directory = edited(base, tmp_path / "model", CASES["yarn"])
    assert torch.equal(
        load_model(directory, torch.bfloat16).model.rope.inv_freq, load_model(directory).model.rope.inv_freq
    )
