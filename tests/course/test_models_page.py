"""Course machinery. lessons/models.toml and what the page makes of it: sources, and figures that others state too."""

import re

from scripts.bench import latents_counts, windows_counts
from scripts.pages.models import models

import pytest

FOUND = {model.name: model for model in models()}
NAMES = {"Llama 3 8B": "Llama 3.1 8B"}  # the same layers and heads
COUNTED = [model for model in latents_counts.MODELS if NAMES.get(model.name, model.name) in FOUND]
WINDOWED = [shape for shape in windows_counts.MODELS if shape.name in FOUND]


def test_each_model_has_a_source_that_cannot_change():
    assert len({model.id for model in FOUND.values()}) == len(FOUND) == len(models())
    for model in FOUND.values():
        assert re.match(r"https://github\.com/[\w-]+/[\w-]+/blob/([0-9a-f]{40}|v\d[\d.]+)/", model.source), model.name
        assert re.fullmatch(r"[\w-]+/[\w.-]+", model.id), model.name


@pytest.mark.parametrize("counted", COUNTED, ids=lambda model: model.name)
def test_lesson_16_counts_the_same_bytes(counted):
    costs = FOUND[NAMES.get(counted.name, counted.name)].costs
    assert (costs.bytes_per_token, costs.state_bytes) == (counted.token_bytes, counted.state_bytes)


@pytest.mark.parametrize("shape", WINDOWED, ids=lambda shape: shape.name)
@pytest.mark.parametrize("length", [512, 4096, 32_768])
def test_lesson_15_s_manager_holds_the_same_bytes(shape, length):
    assert FOUND[shape.name].costs.request_bytes(length) == windows_counts.sequence_bytes(shape, length)


def test_these_lists_are_not_empty():
    assert len(COUNTED) >= 5 and len(WINDOWED) == 4
