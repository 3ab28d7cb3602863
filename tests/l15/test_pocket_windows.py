"""Lesson 15. The shipped model with windows: a config for the pocket model's weights, found and used by its name."""

import pytest

from mini_engine.base.errors import UserError
from mini_engine.checkpoint import shipped
from mini_engine.checkpoint.directory import resolve_checkpoint
from mini_engine.pocket import POCKET_DIR
from mini_engine.windows.window_config import WindowConfig
from tests.support import refused

pytestmark = pytest.mark.reference  # about the shipped model, not about a task


@pytest.mark.parametrize("fault", ["read-only", "a file"])
def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch, fault):
    blocked = tmp_path / "cache"
    blocked.write_text("", encoding="utf-8")  # a file where a folder should be, which also root cannot write into
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked if fault == "a file" else blocked / "deeper"))
    shipped.combined.cache_clear()
    try:
        directory = resolve_checkpoint("pocket-windows")
        assert WindowConfig.from_dir(directory).sliding_window == 23
    finally:
        shipped.combined.cache_clear()


def test_a_model_without_windows_is_refused_by_this_lessons_script():
    with refused(UserError, "window lesson 15"):
        WindowConfig.from_dir(POCKET_DIR)
