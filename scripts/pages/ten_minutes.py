"""Course machinery. The page of ten minutes: records its chat from the engine, and draws two of its pictures.

    python -m scripts.pages.ten_minutes    # run the two messages, write lessons/ten-minutes/chat.json and the pictures

The chat is the pocket model's: two messages, answered with a prefix cache of blocks of four tokens.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from scripts import ROOT, first_line
from scripts.pages.chats import STYLE
from scripts.pages.generated import settle

FOLDER = ROOT / "lessons" / "ten-minutes"
RECORD, TOKENS, BILL = FOLDER / "chat.json", FOLDER / "tokens.svg", FOLDER / "bill.svg"
SYSTEM = "You are a helpful assistant."
QUESTIONS = ("What is the capital of France?", "What is the capital of Japan?")
BLOCK_SIZE = 4
WIDTH, LETTER, PAD, ROW = 400, 6.6, 6, 25  # pixels: the picture, a character, beside a word, a line of words
BARS = {"system": 2048, "message": 64, "answer": 256, "messages": 20}  # as the tool opens: assets/js/tools/bill.js
RULES = """.kv-tree .head { font-weight: 600; } .kv-tree .mid { text-anchor: middle; }
.kv-tree .end { text-anchor: end; }
.kv-tree .old { fill: var(--kv-d-soft); stroke: var(--kv-d); } .kv-tree .new { fill: var(--kv-a); }
"""


def record() -> dict[str, Any]:
    """Return the chat: for each message its prompt's tokens as text, how many were found, and the answer."""
    from mini_engine import LLM, SamplingParams
    from mini_engine.pocket import POCKET_DIR
    from mini_engine.text.tokenizer import Tokenizer

    names, turns = Tokenizer(POCKET_DIR).token_bytes, []
    chat = [{"role": "system", "content": SYSTEM}]
    with LLM(num_blocks=64, block_size=BLOCK_SIZE) as llm:
        for question in QUESTIONS:
            chat.append({"role": "user", "content": question})
            (done,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=40), progress=False)
            words = [names[token].decode("utf-8", "replace") for token in done.prompt_token_ids]
            turns.append({"prompt": words, "found": done.num_cached_tokens, "answer": done.text})
            chat.append({"role": "assistant", "content": done.text})
    return {"block_size": BLOCK_SIZE, "turns": turns}


def read() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def parts(chat: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Return the second prompt in three parts, each with a heading and a colour: sent, answered, new."""
    first, second = (turn["prompt"] for turn in chat["turns"])
    end = second.index("<|im_end|>", len(first))
    sent, answer, new = second[: len(first)], second[len(first) : end], second[end:]
    return [
        (f"your first message, as sent: {len(sent)} tokens", "a", sent),
        (f"its answer: {len(answer)}", "b", answer),
        (f"only this is new in your second message: {len(new)}", "d", new),
    ]


def tokens_picture(chat: dict[str, Any]) -> str:
    """Return the picture of the second message's prompt, a box for each token."""
    shapes, y = [], 16.0
    for head, shade, words in parts(chat):
        shapes.append(f'<text class="head" x="2" y="{y:g}">{head}</text>')
        x, y = 2.0, y + 8
        for word in words:
            shown = word.replace("\n", "↵").strip().removeprefix("<|").removesuffix("|>")
            wide = LETTER * len(shown) + 2 * PAD
            if x + wide > WIDTH - 2:
                x, y = 2.0, y + ROW
            shapes.append(f'<rect class="cell {shade}" x="{x:g}" y="{y:g}" width="{wide:g}" height="21" rx="4"/>')
            shapes.append(f'<text class="mid" x="{x + wide / 2:g}" y="{y + 15:g}">{escape(shown)}</text>')
            x += wide + 3
        y += ROW + 19
    alt = "; ".join(head for head, _, _ in parts(chat))
    return svg(y - 22, f"The tokens of a chat's second prompt. {alt}", shapes)


def bars() -> Iterator[str]:
    """Yield a bar for each message of a chat: tokens that were sent before, and on top the new ones."""
    new, step, bottom, high = BARS["message"], (WIDTH - 8) / BARS["messages"], 150, 120
    prompts = [BARS["system"] + (i + 1) * new + i * BARS["answer"] for i in range(BARS["messages"])]
    for i, tokens in enumerate(prompts):
        old, scale = (tokens - new if i else 0), high / prompts[-1]
        place = f'x="{4 + i * step:.1f}" width="{0.8 * step:.1f}"'
        yield f'<rect class="old" {place} y="{bottom - scale * old:.1f}" height="{scale * old:.1f}"/>'
        yield f'<rect class="new" {place} y="{bottom - scale * tokens:.1f}" height="{scale * (tokens - old):.1f}"/>'
    yield f'<text x="4" y="14">prompt tokens of each message, up to {prompts[-1]:,}</text>'
    yield '<text x="4" y="168">first message</text>'
    yield f'<text class="end" x="{WIDTH - 4}" y="168">message {len(prompts)}</text>'


def svg(high: float, alt: str, shapes: list[str]) -> str:
    style = STYLE.read_text(encoding="utf-8").partition("/* The figure */")[0] + RULES
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="kv-tree" viewBox="0 0 {WIDTH} {high:g}" width="560"'
    return (
        f'{head} font-family="system-ui, sans-serif" role="img" aria-label="{alt}">\n<style>\n{style}</style>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def files(chat: dict[str, Any] | None = None) -> dict[Path, str]:
    """Return the texts that the record and the pictures should have; without a chat, those of the recorded one."""
    chat = chat or read()
    alt = "A bar for each message of a chat. Each is higher than the one before, but only its thin top is new."
    return {
        RECORD: json.dumps(chat, indent=1) + "\n",
        TOKENS: tokens_picture(chat),
        BILL: svg(176, alt, list(bars())),
    }


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=first_line(__doc__).removeprefix("Course machinery. ")).parse_args(argv)
    return settle(files(record()), check=False)


if __name__ == "__main__":
    sys.exit(main())
