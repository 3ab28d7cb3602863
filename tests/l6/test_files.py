"""Lesson 6. What the files beside the weights say of a checkpoint's text: how answers end, and how they are sampled."""

import json
import shutil

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.engine.request import FinishReason
from mini_engine.pocket import POCKET_DIR

pytestmark = pytest.mark.reference  # about files, not about a task

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
END, OF_TEXT = 2047, 2045  # <|im_end|>, <|endoftext|>


def written(directory, file="generation_config.json", **settings):
    """Copy the pocket model, with one of its JSON files changed; None takes a name away."""
    shutil.copytree(POCKET_DIR, directory)
    path = directory / file
    found = json.loads(path.read_text(encoding="utf-8")) | settings
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}), encoding="utf-8")
    return directory


def opened(directory) -> LLM:
    return LLM(directory, num_blocks=32, backend="reference", kernel="torch")


def greedy(max_tokens=30, **changes):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **changes)


# How answers end.


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """The pocket model, whose generation config does not name the end of a turn."""
    with opened(written(tmp_path_factory.mktemp("endless") / "model", eos_token_id=OF_TEXT)) as llm:
        yield llm


@pytest.mark.parametrize(
    ("file", "settings", "lines"),
    [
        ("generation_config.json", {}, 0),
        ("generation_config.json", {"eos_token_id": OF_TEXT}, 1),
        ("tokenizer_config.json", {"eos_token": "<|im_start|>"}, 1),
        ("tokenizer_config.json", {"eos_token": None}, 0),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}, 0),
    ],
)
def test_a_tokenizer_s_end_that_ends_no_answer_is_worth_one_line(tmp_path, capsys, file, settings, lines):
    opened(written(tmp_path / "model", file, **settings)).close()
    said = capsys.readouterr().err
    assert said.count("\n") == lines and (not lines or "eos_token" in said), said


@pytest.mark.parametrize("stop", ["<|im_end|>", "im_end", ["never", "<|im_end|>"]])
def test_a_stop_string_may_be_a_control_token(endless, stop):
    full = endless.chat(QUESTION, greedy(), progress=False)[0]
    at = full.token_ids.index(END)
    assert len(full.token_ids) > at + 1, "without it the answer goes on behind the end of the turn"
    ended = endless.chat(QUESTION, greedy(stop=stop), progress=False)[0]
    assert ended.token_ids == full.token_ids[: at + 1] and ended.finish_reason == FinishReason.STOP
    assert ended.text == endless.tokenizer.decode(full.token_ids[:at])
    deltas = list(endless.stream(QUESTION, greedy(stop=stop)))
    assert "".join(delta.text for delta in deltas) == ended.text and deltas[-1].finish_reason == FinishReason.STOP


def test_what_was_held_back_is_shown_before_a_control_token_that_stops(endless):
    full = endless.chat(QUESTION, greedy(), progress=False)[0].token_ids
    text = endless.tokenizer.decode(full[: full.index(END)])
    held = greedy(stop=[text[-3:] + "x", "<|im_end|>"])
    assert endless.chat(QUESTION, held, progress=False)[0].text == text, "the end may begin a stop string, and does not"
