"""Course machinery. lessons/models.toml and what the page makes of it: sources, and figures that others state too."""

import re

from scripts.bench import windows_counts
from scripts.pages.models import models

import pytest

FOUND = {model.name: model for model in models()}


def test_each_model_has_a_source_that_cannot_change():
    assert len({model.id for model in FOUND.values()}) == len(FOUND) == len(models())
    for model in FOUND.values():
        assert re.match(r"https://github\.com/[\w-]+/[\w-]+/blob/([0-9a-f]{40}|v\d[\d.]+)/", model.source), model.name
        assert re.fullmatch(r"[\w-]+/[\w.-]+", model.id), model.name


@pytest.mark.parametrize("shape", windows_counts.MODELS, ids=lambda shape: shape.name)
@pytest.mark.parametrize("length", [512, 4096, 32_768])
def test_lesson_15_s_manager_holds_the_same_bytes(shape, length):
    assert FOUND[shape.name].costs.request_bytes(length) == windows_counts.sequence_bytes(shape, length)
