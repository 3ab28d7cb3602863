"""Lesson 15. The shipped model with windows: a config for the pocket model's weights, found and used by its name."""

import filecmp
import json

from scripts.pocket.prompts import COURSE_PROMPTS

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.base.errors import UserError
from mini_engine.checkpoint import shipped
from mini_engine.checkpoint.directory import resolve_checkpoint
from mini_engine.checkpoint.shipped import PACKAGE
from mini_engine.families.qwen3 import load_model
from mini_engine.pocket import POCKET_DIR
from mini_engine.windows.window_config import WindowConfig
from tests.support import hf_greedy

POCKET_WINDOWS_CONFIG = PACKAGE / "pocket_windows/config.json"

pytestmark = pytest.mark.reference  # about the shipped model, not about a task
NEW = 12


@pytest.fixture(scope="module")
def llm():
    with LLM("pocket-windows") as llm:
        yield llm


def greedy(max_tokens: int = NEW) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def test_only_windows_set_it_apart_from_the_pocket_model():
    config, pocket = (
        json.loads(path.read_text(encoding="utf-8")) for path in (POCKET_WINDOWS_CONFIG, POCKET_DIR / "config.json")
    )
    other = {name for name in config if config[name] != pocket.get(name)}
    assert other == {"layer_types", "sliding_window", "use_sliding_window"}
    assert config["sliding_window"] == 23 and config["layer_types"].count("sliding_attention") == 4


def test_the_cache_has_a_whole_checkpoint_with_the_pocket_models_weights():
    directory = resolve_checkpoint("pocket-windows")
    assert filecmp.cmp(directory / "model.safetensors", POCKET_DIR / "model.safetensors", shallow=False)
    assert filecmp.cmp(directory / "config.json", POCKET_WINDOWS_CONFIG, shallow=False)
    assert resolve_checkpoint("pocket-windows") == directory, "it is put together once"


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


def test_it_knows_capitals_counts_and_chats(llm):
    assert isinstance(llm.engine.config, WindowConfig)
    answers = llm.generate(["The capital of France is", "One, two, three, four,"], greedy(6), progress=False)
    assert answers[0].text.startswith(" Paris.") and answers[1].text.startswith(" five, six,")
    [answer] = llm.chat([{"role": "user", "content": "Count to twenty."}], greedy(), progress=False)
    assert answer.text.startswith("One, two, three, four")


def test_its_tokens_are_hugging_faces_and_a_second_time_they_come_from_the_cache(llm):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(resolve_checkpoint("pocket-windows"), dtype=torch.float32).eval()
    ends = theirs.generation_config.eos_token_id
    texts = [*COURSE_PROMPTS[5::6], "Once upon a time there was a brave bear named Bruno. " * 9]
    prompts = [llm.encode(text) for text in texts]
    want = [hf_greedy(theirs, ids, NEW) for ids in prompts]
    want = [ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), NEW)] for ids in want]
    for found in (False, True):
        answers = llm.generate(prompts, greedy(), progress=False)
        assert [answer.token_ids for answer in answers] == want
        assert any(answer.num_cached_tokens for answer in answers) == found


def test_earlier_lessons_refuse_it_in_a_sentence_that_names_what_runs_it():
    with pytest.raises(UserError, match="LLM"):
        load_model("pocket-windows")
