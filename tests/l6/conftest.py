"""Lesson 6. The pocket model's tokenizer, which most tests of this lesson use, and a folder of its files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def pocket() -> Tokenizer:
    """The pocket model's tokenizer."""
    return Tokenizer(POCKET_DIR)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[..., Path]:
    """Return what copies the pocket model, with one of its JSON files changed; None takes a name away."""

    def write(file: str = "generation_config.json", **settings: Any) -> Path:
        directory = tmp_path_factory.mktemp("pocket") / "model"
        shutil.copytree(POCKET_DIR, directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        path = directory / file
        found = json.loads(path.read_text(encoding="utf-8")) | settings
        path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}), encoding="utf-8")
        return directory

    return write
