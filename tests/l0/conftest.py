"""Lesson 0. Checkpoints of two layers, which tests copy and change."""

from pathlib import Path

import pytest

from tests.support import write_checkpoint


@pytest.fixture(scope="session")
def bases(tmp_path_factory) -> dict[bool, Path]:
    """A checkpoint whose head is the embedding, and one with a head of its own, by whether it is tied."""
    places = {tied: tmp_path_factory.mktemp("base") for tied in (True, False)}
    return {
        tied: write_checkpoint(place, tie_word_embeddings=tied, num_hidden_layers=2) for tied, place in places.items()
    }


@pytest.fixture(scope="session")
def base(bases) -> Path:
    """The one with a head of its own."""
    return bases[False]
