"""Lesson 15. Which configs describe windows, as transformers reads them, and what is refused in one sentence."""

import json

import pytest

from mini_engine.assembly.loading import reader_of
from mini_engine.base.errors import UserError
from mini_engine.model.kinds import FULL, SLIDING
from mini_engine.windows.window_config import WindowConfig
from tests.support import refused

pytestmark = pytest.mark.reference
BASE = dict(
    model_type="qwen3",
    vocab_size=160,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def written(tmp_path, **changes):
    config = {name: value for name, value in (BASE | changes).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        dict(use_sliding_window=True, sliding_window=7, layer_types=[SLIDING, FULL, SLIDING, SLIDING]),
        dict(use_sliding_window=True, sliding_window=7, layer_types=[SLIDING] * 4),
        dict(use_sliding_window=True, sliding_window=7, max_window_layers=1),
        dict(use_sliding_window=True, sliding_window=7, max_window_layers=0, layer_types=None),
        dict(use_sliding_window=True, max_window_layers=3),
        dict(use_sliding_window=True, sliding_window=2, layer_types=[FULL, SLIDING, FULL, FULL], max_window_layers=0),
    ],
    ids=str,
)
def test_windows_are_those_that_transformers_sees(tmp_path, changes):
    from transformers import AutoConfig

    path = written(tmp_path, **changes)
    theirs, shape = AutoConfig.from_pretrained(path), reader_of(path).shape
    ours = shape(path)
    assert isinstance(ours, WindowConfig), "the loader is chosen by what the config says"
    assert list(ours.layer_types) == theirs.layer_types and ours.sliding_window == theirs.sliding_window


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(use_sliding_window=True, sliding_window=7, layer_types=[FULL] * 4),
        dict(use_sliding_window=True, sliding_window=7, max_window_layers=4),
        dict(use_sliding_window=True, sliding_window=None, max_window_layers=0),
        dict(use_sliding_window=False, sliding_window=7, max_window_layers=0),
    ],
    ids=str,
)
def test_a_model_whose_layers_all_see_everything_is_lesson_0s(tmp_path, changes):
    shape = reader_of(written(tmp_path, **changes)).shape(tmp_path)
    assert not isinstance(shape, WindowConfig)


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        (dict(sliding_window=1), "sliding_window 1 2"),
        (dict(sliding_window=-3), "sliding_window -3 2"),
        (dict(sliding_window="7"), "sliding_window '7'"),
        (dict(sliding_window=None), "use_sliding_window sliding_window"),
        (dict(use_sliding_window=False), "use_sliding_window sliding_window"),
        (dict(layer_types=[SLIDING, FULL]), "2 layer_types 4"),
        (dict(layer_types=[SLIDING, FULL, "chunked_attention", FULL]), "'chunked_attention'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_run_is_refused_in_one_sentence(tmp_path, changes, values):
    good = dict(use_sliding_window=True, sliding_window=7, layer_types=[SLIDING, FULL, SLIDING, FULL])
    path = written(tmp_path, **good | changes)
    with refused(UserError, values):
        reader_of(path).shape(path)


def test_an_engine_that_would_ignore_windows_is_refused():
    from mini_engine.assembly.loading import load
    from mini_engine.engine.engine import Engine

    with refused(UserError, "LLM build_engine"):
        Engine.for_model(load("pocket-windows", "float32", "cpu"), num_blocks=8)


def test_a_model_without_windows_is_refused_by_this_lessons_script(tmp_path):
    with pytest.raises(UserError):
        WindowConfig.from_dir(written(tmp_path))
