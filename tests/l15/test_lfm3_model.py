"""Lesson 15. All kinds of layers in one model: LFM3's layers against Hugging Face's, and what a config.json may say."""

import json
import shutil

import pytest
import torch

from mini_engine.assembly.choices import with_layers
from mini_engine.assembly.loading import load, reader_of
from mini_engine.base.errors import UserError
from mini_engine.families.lfm3 import FAMILY
from mini_engine.families.lfm3_config import Lfm3Config
from mini_engine.layers import native
from mini_engine.model.decoder import Decoder
from mini_engine.model.kinds import Full, State, Window, attending
from tests.l15.lfm3 import SHAPES, checkpoint, hugging_face, logits, write_lfm3
from tests.l15.lfm3 import load as load_lfm3
from tests.support import refused, some_ids

pytestmark = pytest.mark.reference  # no task is about this
PUBLISHED = "as published"


def has_compiler():
    try:
        native.LIBRARY.load()
    except UserError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="NOT CHECKED: packed weights in C++; no compiler")
each_shape = pytest.mark.parametrize("shape", SHAPES)


@each_shape
def test_logits_equal_hugging_face_s(shape):
    ids = some_ids(40, 160, seed=1)
    with torch.inference_mode():
        theirs = hugging_face(shape)(torch.tensor([ids])).logits[0]
    model = load_lfm3(shape)
    for pieces in ((40,), (1, 7, 6, 7, 8), ()):
        ours = logits(model, ids, pieces)
        assert torch.allclose(ours, theirs, atol=3e-4), f"they differ by up to {(ours - theirs).abs().max():.2g}"


@each_shape
@pytest.mark.parametrize("backend", ["torch", pytest.param("packed", marks=needs_compiler)])
def test_fast_layers_compute_the_same(shape, backend):
    ids = some_ids(30, 160, seed=3)
    reference, model = load_lfm3(shape), load_lfm3(shape)
    fast = with_layers(model, backend)
    assert not isinstance(fast.model, Decoder) and with_layers(fast, backend) is fast
    close = dict(atol=3e-4, rtol=0.0)
    torch.testing.assert_close(logits(fast, ids, (17,)), logits(reference, ids, (17,)), **close)


def test_a_checkpoint_in_shards_is_the_same(tmp_path):
    letters, window, changes = SHAPES[PUBLISHED]
    write_lfm3(tmp_path, letters, window, shard_size="40KB", **changes)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, shards = (dict(model.named_parameters()) for model in (load_lfm3(PUBLISHED), FAMILY.load(tmp_path)))
    assert whole.keys() == shards.keys() and all(torch.equal(whole[name], shards[name]) for name in whole)


def test_in_bfloat16_logits_are_near_hugging_face_s():
    from transformers import AutoModelForCausalLM

    ids = some_ids(20, 160, seed=1)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint(PUBLISHED), dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0].float()
    got = logits(load_lfm3(PUBLISHED, torch.bfloat16), ids, (20,)).float()
    assert (got - want).abs().max() < 0.1 * want.abs().max()


def test_each_layer_has_a_kind():
    config = Lfm3Config.from_dir(checkpoint(PUBLISHED))
    state = State((((48, 6), None),))
    assert config.layers == (state, state, Full(), state, Window(7), state)
    assert len(attending(config.layers)) == 2
    assert config.kv_bytes_per_token(torch.float32) == 2 * 2 * 2 * 16 * 4


def test_any_loader_takes_it():
    model = load(checkpoint(PUBLISHED), "auto", "cpu")
    assert isinstance(model.config, Lfm3Config) and reader_of(checkpoint(PUBLISHED)) == FAMILY


SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
    "attention_bias", "conv_bias", "conv_L_cache", "sliding_window", "use_sandwich_norm", "use_attention_gate",
)  # fmt: skip
SMALL = dict(
    model_type="lfm3", vocab_size=160, hidden_size=48, intermediate_size=96, num_hidden_layers=5,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def written(directory, **changes):
    settings = {name: value for name, value in (SMALL | changes).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(norm_eps=1e-3, head_dim=16, max_position_embeddings=77, tie_word_embeddings=False),
        dict(attention_bias=True, conv_bias=True, conv_L_cache=2, use_sandwich_norm=False, use_attention_gate=False),
        dict(layer_types=["conv", "sliding_attention", "full_attention", "conv", "conv"], sliding_window=9),
        dict(
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 7.0},
                "sliding_attention": {"rope_type": "proportional", "rope_theta": 9.0, "partial_rotary_factor": 0.3},
            }
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_settings_are_those_that_transformers_sees(tmp_path, changes):
    from transformers import AutoConfig

    theirs, ours = AutoConfig.from_pretrained(written(tmp_path, **changes)), Lfm3Config.from_dir(tmp_path)
    assert {name: getattr(ours, name) for name in SAME} == {name: getattr(theirs, name) for name in SAME}
    assert list(ours.layer_types) == theirs.layer_types
    for name, rope in zip(("full_attention", "sliding_attention"), ours.ropes, strict=True):
        given = {"partial_rotary_factor": 1.0, "factor": 1.0} | theirs.rope_parameters[name]
        assert rope._asdict() == given


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        (dict(layer_types=["conv"] * 4), "4 layer_types 5"),
        (dict(layer_types=["conv"] * 5), "attention"),
        (dict(layer_types=["conv", "full_attention", "linear_attention", "conv", "conv"]), "layer_types.2"),
        (dict(num_attention_heads=3), "3 2"),
        (dict(sliding_window=1), "sliding_window 1 2"),
        (dict(sliding_window=None), "sliding_window"),
        (dict(conv_L_cache=1), "conv_L_cache 1 2"),
        (dict(hidden_size="absent"), "hidden_size"),
        (dict(quantization_config={"bits": 4}), "quantiz"),
        (dict(rope_parameters={"rope_type": "default"}), "rope_parameters.full_attention"),
        (dict(rope_parameters={"full_attention": {"rope_type": "yarn"}}), "rope_parameters.full_attention.rope_type"),
        (dict(model_type="lfm3_moe"), "'lfm3_moe' 'lfm3'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_run_is_refused_in_one_sentence(tmp_path, changes, values):
    path = written(tmp_path, **changes)
    with refused(UserError, values):
        reader_of(path).shape(path)


def test_a_tensor_that_is_missing_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint(PUBLISHED), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.conv.conv.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with refused(UserError, "model.layers.0.conv.filters.weight"):
        FAMILY.load(tmp_path)
