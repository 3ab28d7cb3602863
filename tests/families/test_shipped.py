"""Course machinery. The shipped models: small, genuine ones of their families, and they answer as prompts expect."""

import filecmp
import json

from scripts.pocket.prompts import COURSE_PROMPTS

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.checkpoint.directory import resolve_checkpoint
from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.latents.latent_config import LatentConfig
from mini_engine.pocket import POCKET_DIR
from mini_engine.windows.window_config import WindowConfig
from tests.support import hf_greedy

NEW = 12
CONFIGS = {"pocket-hybrid": HybridConfig, "pocket-windows": WindowConfig, "pocket-latent": LatentConfig}
MODEL_TYPES = {"pocket-hybrid": "qwen3_5_text", "pocket-windows": "qwen3", "pocket-latent": "deepseek_v3"}
MIB = {"pocket-hybrid": 12, "pocket-windows": 12, "pocket-latent": 8}


@pytest.fixture(scope="module", params=CONFIGS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def llm(name):
    with LLM(name) as llm:
        yield llm


def greedy(max_tokens: int = NEW) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def test_the_folder_is_small_and_has_the_pocket_model_s_tokenizer(name):
    folder = resolve_checkpoint(name)
    assert sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) < MIB[name] * 2**20
    assert filecmp.cmp(folder / "tokenizer.json", POCKET_DIR / "tokenizer.json", shallow=False)


def test_it_is_one_of_its_family(name, llm):
    config = json.loads((resolve_checkpoint(name) / "config.json").read_text(encoding="utf-8"))
    assert isinstance(llm.engine.config, CONFIGS[name]) and config["model_type"] == MODEL_TYPES[name]


def test_it_knows_capitals_counts_and_chats(llm):
    answers = llm.generate(["The capital of France is", "One, two, three, four,"], greedy(6), progress=False)
    assert answers[0].text.startswith(" Paris.") and answers[1].text.startswith(" five, six,")
    [answer] = llm.chat([{"role": "user", "content": "Count to twenty."}], greedy(), progress=False)
    assert answer.text.startswith("One, two, three, four")


def test_its_tokens_are_hugging_face_s_and_a_second_time_they_come_from_the_cache(name, llm):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(name), dtype=torch.float32).eval()
    ends = theirs.generation_config.eos_token_id
    texts = [*COURSE_PROMPTS[5::6], "Once upon a time there was a brave bear named Bruno. " * 9]
    prompts = [llm.encode(text) for text in texts]
    want = [hf_greedy(theirs, ids, NEW) for ids in prompts]
    want = [ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), NEW)] for ids in want]
    for found in (False, True):
        answers = llm.generate(prompts, greedy(), progress=False)
        assert [answer.token_ids for answer in answers] == want
        assert any(answer.num_cached_tokens for answer in answers) == found
