"""Lesson 9. A pytest plugin that runs earlier lessons' tests unchanged with fast models.

`MINI_ENGINE_BACKEND` says which backend: "packed" (the default) or "torch".
"""

import os

from mini_engine.families import qwen3
from mini_engine.layers import speed_up

load_slow_model = qwen3.load_model


def load_fast_model(*args, **kwargs):
    return speed_up(load_slow_model(*args, **kwargs), os.environ.get("MINI_ENGINE_BACKEND", "packed"))


def pytest_configure(config):
    qwen3.load_model = load_fast_model  # before a test or a lesson's module imports it
