"""Course machinery. The pocket model in the page: its tokens are the repository's, its slots are the allocator's.

Protects readers from tokens on the front page that are not those of the engine. It needs Pyodide for the allocator,
which `python -m scripts.website.live` fetches.
"""

import random
from collections.abc import Iterator

from scripts.live.answers import MOST_ANSWER, MOST_PROMPT, SETTINGS, fed
from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.website import live
from scripts.website.browser import visiting

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.base.errors import UserError
from tests.course.site_fixtures import PATIENCE_MS
from tests.course.test_live import needs_python

ENDS = (2045, 2047)
TYPED = ["The capital of Spain is", "Count from one to five.", "Once upon a time", "naïve 漢字 🙂"]
SIGNS = "abc XYZ'’sS\n\r\t 0123.,;!?éß漢🙂\u00a0\u2003\ufeff\u0085-_|<>"
TEXTS = [
    "",
    "it's THEY'LL don'T 12345 × é ü 漢字 🙂🙂 \t tab",
    "<|im_start|>user\nHi<|im_end|>\n",
    "  before\r\n\r\n after   ",
    "def f(x):\n    return x**2  # hm\n",
    *("".join(random.Random(seed).choices(SIGNS, k=seed % 40)) for seed in range(200)),
]

# What a page's scripts compute, asked without the buttons. Slots are handed out in an order that is not the tokens'.
ENCODE = """async ([base, texts]) => {
    const { Tokenizer } = await import(base + "assets/live/pocket/tokens.js");
    const tokenizer = new Tokenizer(await (await fetch(base + "assets/live/vendor/pocket/tokenizer.json")).json());
    return texts.map((text) => [tokenizer.encode(text), tokenizer.decode(tokenizer.encode(text))]);
}"""
CONTINUE = """async ([base, prompts, most, ends]) => {
    const { Model, readTensors } = await import(base + "assets/live/pocket/model.js");
    const get = (name) => fetch(base + "assets/live/vendor/pocket/" + name);
    const tensors = readTensors(await (await get("model.safetensors")).arrayBuffer());
    const model = new Model(await (await get("config.json")).json(), tensors, 101);
    const slots = Array.from({ length: 101 }, (_, i) => (i * 37) % 101);
    return prompts.map((ids) => {
        const answer = [];
        const isOver = () => answer.length === most || ends.includes(answer.at(-1));
        for (let feed = ids, start = 0; !isOver(); feed = answer.slice(-1)) {
            answer.push(model.next(feed, start, slots));
            start += feed.length;
        }
        return answer;
    });
}"""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def greedy(llm: LLM, prompts: list[list[int]], most: int = MOST_ANSWER) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=most)
    return [list(done.token_ids) for done in llm.generate(prompts, params, progress=False)]


def without_end(ids: list[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] in ENDS else ids


# The pool, in this Python


def texts_of(*lengths: tuple[int, int]) -> list[dict]:
    """Return requests, each with a prompt's and an answer's length; all but the last token of an answer is fed."""
    return [
        {"name": "ABCDEF"[i], "tokens": ["x"] * (prompt + answer), "prompt": prompt, "fed": prompt + answer - 1}
        for i, (prompt, answer) in enumerate(lengths)
    ]


def test_each_token_gets_a_slot_of_its_own_and_the_oldest_request_makes_room():
    found = fed(texts_of((5, 24), (32, 24)))
    assert len(found["slots"]) == len(set(found["slots"])) == 55
    frames = found["trace"]["frames"]
    assert sum("A has ended" in frame["say"] for frame in frames) == 1
    assert [each["name"] for each in frames[-1]["requests"]] == ["B"]
    for frame in frames:
        held = [block for each in frame["requests"] for block in each["blocks"]]
        assert sorted([*held, *frame["free"]]) == list(range(SETTINGS["blocks"]))
    assert frames[-1]["requests"][-1]["written"] == 55 and len(frames[-1]["requests"][-1]["words"]) == 56


def test_what_was_fed_keeps_its_slots_while_an_answer_grows():
    whole = fed(texts_of((7, 9), (6, 12)))["slots"]
    for answer in range(1, 12):
        slots = fed(texts_of((7, 9), (6, answer)))["slots"]
        assert slots == whole[: len(slots)], "K and V lie where they were written: no token may move"


def test_the_longest_prompt_and_answer_fit_and_a_longer_prompt_is_refused():
    fed(texts_of((MOST_PROMPT, MOST_ANSWER)))
    for length in (0, MOST_PROMPT + 1):
        with pytest.raises(UserError):
            fed(texts_of((length, 2)))


# In the page


@pytest.fixture(scope="module")
def visitor(site_http, browser) -> Iterator:
    with visiting(browser, site_http, reduced_motion="reduce") as visitor:
        visitor.page.set_default_timeout(PATIENCE_MS)
        visitor.page.goto(site_http.url())
        yield visitor


@needs_python
def test_the_page_has_the_shipped_model(site_folders):
    for path in live.POCKET:
        copy = site_folders["http"] / "assets" / "live" / "vendor" / "pocket" / path.name
        assert copy.read_bytes() == path.read_bytes()


@needs_python
def test_the_page_s_tokens_of_a_text_are_the_repository_s(visitor, site_http, llm):
    found = visitor.page.evaluate(ENCODE, [site_http.base, TEXTS])
    for text, (ids, back) in zip(TEXTS, found, strict=True):
        assert ids == llm.tokenizer.encode(text), ascii(text)
        assert back == text


@needs_python
def test_the_page_s_greedy_tokens_are_the_repository_s(visitor, site_http, llm):
    prompts = [llm.tokenizer.encode(prompt) for prompt in COURSE_PROMPTS]
    prompts = [prompt for prompt in prompts if len(prompt) + MOST_ANSWER <= 101]
    assert len(prompts) > 20
    found = visitor.page.evaluate(CONTINUE, [site_http.base, prompts, MOST_ANSWER, ENDS])
    for prompt, ours, theirs in zip(prompts, found, greedy(llm, prompts), strict=True):
        assert without_end(ours) == without_end(theirs), llm.tokenizer.decode(prompt)


@needs_python
def test_a_typed_prompt_is_continued_and_fills_the_pool(visitor, llm):
    page = visitor.page
    page.get_by_role("button", name="Run the model here").click()
    texts = []
    for words in TYPED:
        page.locator(".kv-model:not([aria-busy])").wait_for()
        page.locator(".kv-model input").fill(words)
        page.locator(".kv-model input").press("Enter")
        page.locator(".kv-model:not([aria-busy])").wait_for()
        found = page.evaluate("document.querySelector('.kv-model').pocket.result")
        assert found["prompt"] == llm.tokenizer.encode(words)
        (theirs,) = greedy(llm, [found["prompt"]])
        assert without_end(found["answer"]) == without_end(theirs), words
        said = page.locator(".kv-model-text").inner_text()
        assert said.startswith(words) and llm.tokenizer.decode(theirs).strip() in said
        texts = page.evaluate("document.querySelector('.kv-model').pocket.texts")
    drawn = page.evaluate("document.querySelector('.kv-model + .kv-figure').player.trace.frames")
    assert drawn == fed(texts)["trace"]["frames"], "the page's pool must be the one that CPython fills"
    assert not visitor.complaints


@needs_python
def test_what_cannot_be_continued_is_said_in_a_sentence_and_leaves_the_pool_alone(visitor):
    page = visitor.page
    if page.get_by_role("button", name="Run the model here").count():
        page.get_by_role("button", name="Run the model here").click()
    page.locator(".kv-model:not([aria-busy])").wait_for()
    before = page.evaluate("document.querySelector('.kv-model').pocket.texts.length")
    page.locator(".kv-model input").fill("one two three " * 11)
    page.get_by_role("button", name="Continue it").click()
    page.get_by_text(f"give 1 to {MOST_PROMPT}").wait_for()
    assert page.evaluate("document.querySelector('.kv-model').pocket.texts.length") == before
    page.get_by_role("button", name="The opposite of hot is").click()
    page.locator(".kv-model-text", has_text="cold").wait_for()
    assert not visitor.complaints
