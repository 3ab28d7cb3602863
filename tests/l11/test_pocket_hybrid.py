"""Lesson 11. The shipped hybrid: small, a genuine Qwen3.5, and it answers as the pocket model's prompts expect."""

import filecmp
import json

from scripts.pocket.prompts import COURSE_PROMPTS

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.pocket import POCKET_DIR
from tests.support import hf_greedy

POCKET_HYBRID_DIR = shipped_checkpoint("pocket-hybrid")

pytestmark = pytest.mark.reference  # about the shipped model, not about a task

NEW = 12


@pytest.fixture(scope="module")
def llm():
    with LLM("pocket-hybrid") as llm:
        yield llm


def greedy(max_tokens: int = NEW) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def test_the_folder_is_under_12_mib_and_has_the_pocket_model_s_tokenizer():
    assert sum(file.stat().st_size for file in POCKET_HYBRID_DIR.iterdir() if file.is_file()) < 12 * 2**20
    assert filecmp.cmp(POCKET_HYBRID_DIR / "tokenizer.json", POCKET_DIR / "tokenizer.json", shallow=False)


def test_it_is_a_hybrid_that_remembers(llm):
    model = llm.engine.runner.model
    config = json.loads((POCKET_HYBRID_DIR / "config.json").read_text(encoding="utf-8"))
    assert isinstance(model.config, HybridConfig) and config["model_type"] == "qwen3_5_text"
    assert config["layer_types"].count("linear_attention") == 6 and config["tie_word_embeddings"]


def test_it_knows_capitals_and_counts(llm):
    answers = llm.generate(["The capital of France is", "One, two, three, four,"], greedy(6), progress=False)
    assert answers[0].text.startswith(" Paris.") and answers[1].text.startswith(" five, six,")


def test_it_chats(llm):
    [answer] = llm.chat([{"role": "user", "content": "Count to twenty."}], greedy(), progress=False)
    assert answer.text.startswith("One, two, three, four")


def test_its_tokens_are_hugging_face_s_and_a_second_time_they_come_from_checkpoints(llm):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(POCKET_HYBRID_DIR, dtype=torch.float32).eval()
    ends = theirs.generation_config.eos_token_id
    prompts = [llm.encode(prompt) for prompt in COURSE_PROMPTS[5::6]]
    want = [hf_greedy(theirs, ids, NEW) for ids in prompts]
    want = [ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), NEW)] for ids in want]
    for found in (False, True):
        answers = llm.generate(prompts, greedy(), progress=False)
        assert [answer.token_ids for answer in answers] == want
        assert any(answer.num_cached_tokens for answer in answers) == found
