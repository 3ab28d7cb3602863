"""Lesson 16. The shipped model with latents: small, a genuine DeepSeek-V3, and it answers as prompts expect."""

import filecmp
import json

from scripts.pocket.prompts import COURSE_PROMPTS

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.latents.latent_config import LatentConfig
from mini_engine.pocket import POCKET_DIR
from tests.support import hf_greedy

POCKET_LATENT_DIR = shipped_checkpoint("pocket-latent")

pytestmark = pytest.mark.reference  # about the shipped model, not about a task

NEW = 12


@pytest.fixture(scope="module")
def llm():
    with LLM("pocket-latent") as llm:
        yield llm


def greedy(max_tokens: int = NEW) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def test_the_folder_is_under_8_mib_and_has_the_pocket_model_s_tokenizer():
    assert sum(file.stat().st_size for file in POCKET_LATENT_DIR.iterdir() if file.is_file()) < 8 * 2**20
    assert filecmp.cmp(POCKET_LATENT_DIR / "tokenizer.json", POCKET_DIR / "tokenizer.json", shallow=False)


def test_it_caches_latents_in_dense_layers_only(llm):
    config = json.loads((POCKET_LATENT_DIR / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "deepseek_v3" and config["first_k_dense_replace"] == config["num_hidden_layers"]
    assert isinstance(llm.engine.config, LatentConfig)
    assert llm.engine.config.kv_bytes_per_token(torch.float32) == (64 + 32) * 6 * 4


def test_it_knows_capitals_and_counts(llm):
    answers = llm.generate(["The capital of France is", "One, two, three, four,"], greedy(6), progress=False)
    assert answers[0].text.startswith(" Paris.") and answers[1].text.startswith(" five, six,")


def test_it_chats(llm):
    [answer] = llm.chat([{"role": "user", "content": "Count to twenty."}], greedy(), progress=False)
    assert answer.text.startswith("One, two, three, four")


def test_its_tokens_are_hugging_face_s_and_a_second_time_they_come_from_the_cache(llm):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(POCKET_LATENT_DIR, dtype=torch.float32).eval()
    ends = theirs.generation_config.eos_token_id
    prompts = [llm.encode(prompt) for prompt in COURSE_PROMPTS[5::6]]
    want = [hf_greedy(theirs, ids, NEW) for ids in prompts]
    want = [ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), NEW)] for ids in want]
    for found in (False, True):
        answers = llm.generate(prompts, greedy(), progress=False)
        assert [answer.token_ids for answer in answers] == want
        assert any(answer.num_cached_tokens for answer in answers) == found


@pytest.mark.nightly
def test_it_completes_lines_that_it_has_never_read_and_leaves_no_tie():
    from scripts.pocket.evaluation import continue_greedily, wrong_lines
    from scripts.pocket.facts import held_out_lines, load_facts

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(POCKET_LATENT_DIR, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(POCKET_LATENT_DIR)
    lines = list(held_out_lines(load_facts()).values())
    assert len(wrong_lines(model, tokenizer, lines)) <= 3, "README.md of the folder says 243 of 246"
    answers = continue_greedily(model, [tokenizer.encode(prompt) for prompt in COURSE_PROMPTS])
    assert min(min(answer.gaps) for answer in answers) > 0.01, "README.md of the folder says 0.014"
