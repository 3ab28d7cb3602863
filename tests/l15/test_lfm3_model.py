"""Lesson 15. All kinds of layers in one model, LFM3: what a config.json may say, and that it runs in bfloat16."""

import json

import pytest
import torch

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.loading import reader_of
from mini_engine.base.errors import UserError
from mini_engine.families.lfm3_config import Lfm3Config
from mini_engine.model.kinds import Full, State, Window, attending
from tests.shared.lfm3 import checkpoint, load
from tests.support import ask, drain, refused, some_ids

pytestmark = pytest.mark.reference  # no task is about this
PUBLISHED = "as published"


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_an_engine_runs_in_bfloat16(backend):
    """Rounding may decide a token, so tokens are not compared."""
    engine = build_engine(load(PUBLISHED, torch.bfloat16), backend=backend, num_blocks=60, block_size=8)
    requests = ask(engine, [some_ids(length, 160, seed=length) for length in (1, 20, 33)])
    drain(engine)
    assert [(len(request.output_ids), request.error) for request in requests] == [(10, None)] * 3


def test_each_layer_has_a_kind():
    config = Lfm3Config.from_dir(checkpoint(PUBLISHED))
    state = State((((48, 6), None),))
    assert config.layers == (state, state, Full(), state, Window(7), state)
    assert len(attending(config.layers)) == 2
    assert config.kv_bytes_per_token(torch.float32) == 2 * 2 * 2 * 16 * 4


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
