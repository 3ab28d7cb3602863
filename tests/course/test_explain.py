"""Course machinery. `explain_divergence` names the step, the layer and the part where an injected bug first shows.

Protects students whose tokens differ from Hugging Face's from searching in a part of the model that is right.
"""

import argparse
import json
from dataclasses import replace

from scripts import explain_divergence, l0_smoke, l1_smoke
from scripts.smoke.divergence import explain

import pytest
import torch

from mini_engine.engine import loop
from mini_engine.families.qwen3 import load_model
from mini_engine.kv import contiguous
from mini_engine.model import qwen3
from tests.support import both, checkpoint, ran, some_ids, write_checkpoint

FAMILY = "two, tied, wide heads"


def find(script=l1_smoke, model=None):
    """What the tool says of the lesson's run against an unharmed Hugging Face."""
    ours, hf = both(FAMILY)
    args = argparse.Namespace(max_new_tokens=6, dtype="float32", device="cpu", max_seq_len=64, reuse=False)
    return explain(model or ours, hf, script.generate, some_ids(7, ours.config.vocab_size), 6, args)


@pytest.mark.parametrize("script", [l0_smoke, l1_smoke])
def test_without_a_bug_everything_agrees(script):
    finding = find(script)
    assert finding.step is None and "alone, this prompt agrees: 6 tokens equal" in str(finding)


@pytest.mark.parametrize(
    "name, part",
    [
        ("model.layers.1.self_attn.q_norm.weight", "the q norm"),
        ("model.layers.1.self_attn.k_proj.weight", "the k norm"),
        ("model.layers.1.self_attn.v_proj.weight", "attention and its output projection"),
        ("model.layers.1.input_layernorm.weight", "the first norm"),
        ("model.layers.1.post_attention_layernorm.weight", "the second norm"),
        ("model.layers.1.mlp.gate_proj.weight", "the MLP"),
    ],
)
def test_a_changed_weight_is_found_in_its_layer_and_part(name, part):
    model = load_model(checkpoint(FAMILY))
    dict(model.named_parameters())[name].data[: 1 if "norm" in name else 40] += 0.7
    finding = find(model=model)
    assert (finding.step, finding.layer, finding.part) == (0, 1, part), str(finding)
    assert finding.size > 0 and "everything before agrees to" in str(finding)


def all_see_all(q, k, v):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)


set_kv, plan = contiguous.ContiguousKv.set_kv, contiguous.CachedSequence.plan


def a_row_early(kv, layer, slots, k, v):
    """Over a written one: a row late would leave its own as it was made, which may by chance hold the right values."""
    set_kv(kv, layer, slots - int(len(slots) == 1), k, v)


def a_position_early(sequence, token_ids):
    meta = plan(sequence, token_ids)
    return replace(meta, positions=meta.positions - int(sequence.cur_len > 0))


BUGS = {  # what is exchanged, for what, and where that shows: the step, and words
    "RoPE": (qwen3, "apply_rope", lambda x, cos, sin: x.flip(-1), 0, "layer 0|RoPE on q"),
    "a mask that is lost": (contiguous, "causal_attention", all_see_all, 0, "layer 0|attention"),
    "a row early": (contiguous.ContiguousKv, "set_kv", a_row_early, 1, "layer 0|decode"),
    "a position early": (contiguous.CachedSequence, "plan", a_position_early, 1, "at positions [6]|belongs at 7"),
    "the worst token": (loop, "next_token", lambda logits: int(logits.argmin()), 1, "chose|every value before agrees"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found_where_it_is(bug, monkeypatch):
    owner, name, wrong, step, words = BUGS[bug]
    monkeypatch.setattr(owner, name, wrong)
    finding = find()
    assert finding.step == step and all(word in str(finding) for word in words.split("|")), str(finding)


def test_the_command_prints_one_line_a_prompt(capsys):
    arguments = ["--lesson", "1", "--model", str(checkpoint(FAMILY)), "--prompt-ids", "1,2", "--prompt-ids", "3"]
    assert explain_divergence.main(arguments) == 0
    assert [line[:3] for line in capsys.readouterr().out.splitlines()] == ["[0]", "[1]"]


def test_the_command_can_speak_json_and_exits_1_on_a_difference(capsys, tmp_path):
    other = write_checkpoint(tmp_path, seed=3, num_key_value_heads=2, head_dim=40, tie_word_embeddings=True)
    arguments = ["--model", str(checkpoint(FAMILY)), "--hf-model", str(other), "--prompt-ids", "1,2", "--json"]
    assert explain_divergence.main(arguments) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["part"] == "the embedding"


@pytest.mark.parametrize(
    "arguments, words", [(["--lesson", "99"], "there is no lesson 99"), (["--lesson", "x"], "'x'")]
)
def test_a_lesson_that_is_not_there_exits_2(capsys, arguments, words):
    code, _, err = ran(explain_divergence.main, *arguments, capsys=capsys)
    assert code == 2 and words in err
