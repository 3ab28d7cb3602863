"""Lesson 0. Names of stored tensors: what transformers finds under another name, or leaves out, is not refused."""

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.names import EMBEDDING, HEAD
from mini_engine.families.qwen3 import load_model
from tests.l0.edits import rewritten, sharded
from tests.support import refused

FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def names(change):
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


def more(name, *shape):
    return lambda tensors: tensors | {name: torch.ones(shape)}


def head_alone(tensors):
    return {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}


def without(*lost):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in lost}


LAYOUTS = {  # (tied, how the tensors are stored)
    "as transformers writes them": (False, dict),
    "as transformers writes them, tied": (True, dict),
    "without model.": (False, names(lambda name: name.removeprefix("model."))),
    "without model., tied": (True, names(lambda name: name.removeprefix("model."))),
    "model. twice": (False, names(lambda name: f"model.{name}")),
    "the head alone": (True, head_alone),
    "the head alone, without model.": (True, lambda t: names(lambda n: n.removeprefix("model."))(head_alone(t))),
    "the head beside the embedding": (True, lambda t: t | {HEAD: t[EMBEDDING]}),
    "the head below the model": (False, names(lambda name: f"model.{name}" if name == HEAD else name)),
    "frequencies of each layer": (False, more(FREQUENCIES, 8)),
    "frequencies of all layers": (False, more("model.rotary_emb.inv_freq", 8)),
    "a bias that the config does not have": (False, more("model.layers.0.self_attn.q_proj.bias", 64)),
    "a layer too many": (False, more("model.layers.2.mlp.up_proj.weight", 96, 48)),
    "another model's": (False, more("score.weight", 2, 48)),
    "one parameter by two names, the other first": (False, more("embed_tokens.weight", 160, 48)),
    "one parameter by two names, the other second": (False, more("norm.weight", 48)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_shards", [False, True], ids=["one file", "shards"])
def test_parameters_are_those_that_transformers_finds(bases, tmp_path, layout, in_shards):
    from transformers import AutoModelForCausalLM

    tied, change = LAYOUTS[layout]
    directory = rewritten(bases[tied], tmp_path / "model", change)
    if in_shards:
        sharded(directory)
    ours = dict(load_model(directory).named_parameters())
    theirs, report = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"], "transformers has changed: it used to find them all"
    theirs = dict(theirs.named_parameters())
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_that_a_model_does_without_is_worth_one_line_unless_it_is_recomputed(bases, tmp_path, capsys, layout):
    tied, change = LAYOUTS[layout]
    load_model(rewritten(bases[tied], tmp_path / "model", change))
    said = capsys.readouterr().err
    extra = layout.startswith(("a bias", "a layer", "another", "one parameter"))
    assert said.count("\n") == extra, said


def test_a_tensor_is_read_from_the_shard_that_holds_it(bases, tmp_path):
    directory = sharded(rewritten(bases[False], tmp_path / "model", dict), wrong_shard="model.norm.weight")
    assert torch.equal(load_model(directory).model.norm.weight, load_model(bases[False]).model.norm.weight)


LACKING = {  # (tied, how the tensors are stored, what the sentence must name)
    "no head and not tied": (False, without(HEAD), HEAD),
    "no embedding and not tied": (False, without(EMBEDDING), EMBEDDING),
    "neither, tied": (True, without(EMBEDDING), EMBEDDING),
    "a tensor": (False, without("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
    "a layer": (False, lambda t: {n: v for n, v in t.items() if ".layers.1." not in n}, "num_hidden_layers 2 1"),
    "a prefix of its own": (False, names(lambda name: f"base.{name}"), EMBEDDING),
}


@pytest.mark.parametrize("what", LACKING)
@pytest.mark.parametrize("in_shards", [False, True], ids=["one file", "shards"])
def test_a_model_that_is_not_whole_is_refused(bases, tmp_path, what, in_shards):
    tied, change, values = LACKING[what]
    directory = rewritten(bases[tied], tmp_path / "model", change)
    if in_shards:
        sharded(directory)
    with refused(UserError, values):
        load_model(directory)
