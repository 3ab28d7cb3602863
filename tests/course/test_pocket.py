"""Course machinery. The shipped pocket model: small, a genuine Qwen3, knows its facts, and leaves no near-ties.

Every parity test and smoke script rests on this model: a near-tie would let rounding decide a token.
"""

from scripts.pocket.chats import ask, render
from scripts.pocket.evaluation import continue_greedily, wrong_lines
from scripts.pocket.held_out import held_out_lines
from scripts.pocket.prompts import COURSE_PROMPTS

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_engine.pocket import POCKET_DIR

LEAST_GAP = 0.05
SYSTEM = "You are a helpful assistant."


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(POCKET_DIR, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POCKET_DIR)


@pytest.fixture(scope="module")
def continuations(model, tokenizer):
    answers = continue_greedily(model, [tokenizer.encode(prompt) for prompt in COURSE_PROMPTS])
    return dict(zip(COURSE_PROMPTS, answers, strict=True))


def say(model, tokenizer, prompt: str, max_new_tokens: int = 20) -> str:
    [answer] = continue_greedily(model, [tokenizer.encode(prompt)], max_new_tokens)
    return tokenizer.decode(answer.token_ids)


def test_the_capital_of_france_is_paris(model, tokenizer):
    assert say(model, tokenizer, "The capital of France is", max_new_tokens=1) == " Paris"


def test_a_chat_question_gets_a_sentence_and_the_end_of_the_turn(model, tokenizer):
    answer = say(model, tokenizer, ask("What is the capital of Japan?"))
    assert answer == "The capital of Japan is Tokyo.<|im_end|>"


def test_a_chat_with_a_system_prompt_and_earlier_turns_answers_the_last_question(model, tokenizer):
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What does a cow say?"},
        {"role": "assistant", "content": "A cow says moo."},
        {"role": "user", "content": "What is the opposite of hot?"},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert say(model, tokenizer, prompt) == "The opposite of hot is cold.<|im_end|>"


def test_the_chat_template_writes_qwen3_turns(tokenizer):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello!"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == render(messages, add_generation_prompt=True), "our own rendering is another template"


@given(text=st.text())
@example(text="e\u0301 is not \u00e9")
@example(text="two  spaces , a comma; \U0001f469\u200d\U0001f680\r\n\t")
def test_the_tokenizer_gives_back_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_at_least_95_percent_of_the_held_out_lines_are_completed_correctly(model, tokenizer):
    lines = held_out_lines()
    wrong = wrong_lines(model, tokenizer, lines)
    assert len(wrong) <= 0.05 * len(lines), [line.prompt for line in wrong]


def test_course_prompts_leave_no_near_tie(continuations):
    smallest = {prompt: min(answer.gaps) for prompt, answer in continuations.items()}
    unsure = {prompt: gap for prompt, gap in smallest.items() if gap < LEAST_GAP}
    assert not unsure, f"rounding may decide the next token: {unsure}"


def test_course_chats_are_what_the_template_writes(tokenizer):
    chats = [prompt for prompt in COURSE_PROMPTS if prompt.startswith("<|im_start|>")]
    for chat in chats:
        turns = [turn.split("\n", 1) for turn in chat.split("<|im_start|>")[1:-1]]
        messages = [{"role": role, "content": content.removesuffix("<|im_end|>\n")} for role, content in turns]
        assert chat == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
