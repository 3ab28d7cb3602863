"""Lesson 11. A hybrid beside a vision tower: nested config, other names, tensors that the text model does without."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.families.qwen3_5 import FAMILY as QWEN3_5
from mini_engine.hybrid.hybrid_config import HybridConfig
from tests.support import refused

POCKET_HYBRID_DIR = shipped_checkpoint("pocket-hybrid")

pytestmark = pytest.mark.reference  # about files, not about a task

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VISION = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=192)
ROTATION = dict(mrope_interleaved=True, mrope_section=[3, 3, 2])  # three positions of an image; of text they are equal


def inner(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


def renamed(change):
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


def with_others(tensors):
    others = ("model.visual.blocks.0.x", "visual.x", "mtp.layers.0.x", "mtp.norm.weight")
    return tensors | dict.fromkeys(others, torch.ones(2))


def nested(config):
    """Return the config of a checkpoint that has a vision tower."""
    text = config | {"rope_parameters": config["rope_parameters"] | ROTATION}
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": VISION, "image_token_id": 5}


def tied_outside(inside):
    """Return a change of the config: the head is the embedding, says the outer part; the inner one says `inside`."""

    def change(config):
        text = {name: value for name, value in config.items() if name != "tie_word_embeddings"}
        return nested(text | inside) | {"tie_word_embeddings": True}

    return change


def same(found):
    return found


LAYOUTS = {  # (config, tensors)
    "all of it": (nested, lambda tensors: with_others(renamed(inner)(tensors))),
    "the config alone": (nested, same),
    "tied outside": (tied_outside({}), same),
    "tied outside, not within": (tied_outside({"tie_word_embeddings": False}), renamed(inner)),
    "the names alone": (same, renamed(inner)),
    "the others alone": (same, with_others),
    "the head alone": (nested, renamed(lambda name: HEAD if name == EMBEDDING else inner(name))),
    "the head within": (nested, renamed(lambda name: inner(f"model.{HEAD}" if name == EMBEDDING else name))),
    "without model.": (same, renamed(lambda name: name.removeprefix("model."))),
}


def written(directory, config=same, tensors=same):
    """Copy the pocket hybrid, with its files changed."""
    shutil.copytree(POCKET_HYBRID_DIR, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(config(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    weights = directory / "model.safetensors"
    if tensors is not same:
        save_file({name: tensor.clone() for name, tensor in tensors(load_file(weights)).items()}, weights)
    return directory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_the_same_text_model(tmp_path, capsys, layout):
    config, tensors = LAYOUTS[layout]
    ours, plain = (QWEN3_5.load(d) for d in (written(tmp_path / "model", config, tensors), POCKET_HYBRID_DIR))
    assert ours.config == plain.config
    plain = dict(plain.named_parameters())
    assert [n for n, weight in ours.named_parameters() if not torch.equal(weight, plain.pop(n))] == [] == list(plain)
    assert capsys.readouterr().err == "", "what belongs to the family is no reason for a warning"


@pytest.mark.parametrize("outside", [{}, {"tie_word_embeddings": False}])
def test_a_head_that_neither_part_ties_must_be_there(tmp_path, outside):
    def config(found):
        return nested({**found, "tie_word_embeddings": False}) | outside

    with refused(UserError, HEAD):
        QWEN3_5.load(written(tmp_path / "model", config))


def test_a_vision_tower_without_a_text_model_is_refused(tmp_path):
    with refused(UserError, "vision_config text_config"):
        HybridConfig.from_dir(written(tmp_path / "model", lambda config: config | {"vision_config": VISION}))


@pytest.mark.parametrize(
    ("tensors", "values"),
    [
        (renamed(lambda name: f"base.{name}"), "embed_tokens.weight"),
        (lambda t: with_others({n: v for n, v in t.items() if ".layers.7." not in n}), "num_hidden_layers 8 7"),
        (lambda t: with_others({n: v for n, v in t.items() if n != "model.norm.weight"}), "model.norm.weight"),
        (lambda t: with_others({n: v for n, v in t.items() if n != EMBEDDING}), EMBEDDING),
    ],
)
def test_a_text_model_that_is_not_whole_is_refused(tmp_path, tensors, values):
    with refused(UserError, values):
        QWEN3_5.load(written(tmp_path / "model", tensors=tensors))
