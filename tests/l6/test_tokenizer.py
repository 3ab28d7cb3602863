"""Lesson 6. The tokenizer without transformers: ids, text, marks and conversations are those of AutoTokenizer."""

import codecs
import json
import shutil
import threading

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

from mini_engine.assembly.llm import LLM
from mini_engine.base.errors import UserError
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.detokenizer import Detokenizer
from mini_engine.text.tokenizer import Tokenizer
from tests.support import refused

TEXTS = [
    "The capital of France is Paris. 1, 2, 3.",
    "  two spaces ,  and\n\n\ta tab ",
    "漢字 naïve café e\u0301 👩‍👩‍👧‍👦 \ufffd",
    "<|im_start|>user\nHi<|im_end|>\n<think>well</think>",
    "<|endoftext|><|mark|> <|bos|>x<|im_end|>",
    "",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of Japan?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": '<b>"One" & two</b>, naïve 漢字\n'},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": " four "},
    ],
]
TEMPLATE = """{#- Uses what templates of real checkpoints use. -#}
{%- set state = namespace(first=true) %}
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" and not loop.first %}
        {{- raise_exception("the system speaks first") }}
    {%- endif %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {% generation %}
    {{- message.content | trim }}{% set state.first = false %}
    {% endgeneration %}
    {{- eos_token + message | tojson + dict(a=1) | tojson(indent=2) }}
{%- endfor %}
{%- if tools is none and documents is none and not state.first and unknown is not defined %}
    {{- strftime_now("%Y") }}
{%- endif %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def raw_tokenizer() -> RawTokenizer:
    """A byte-level BPE of 300 entries, cut as Qwen's is."""
    raw = RawTokenizer(models.BPE())
    raw.normalizer, raw.decoder = normalizers.NFC(), decoders.ByteLevel()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    return raw


def write_json(path, data):
    path.write_text(json.dumps(data), encoding="utf-8")


def edit_config(directory, **changes):
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    write_json(path, {name: value for name, value in config.items() if value != "gone"})


# Checkpoints' tokenizers, as they are written.


def pocket(directory):
    shutil.copytree(POCKET_DIR, directory, dirs_exist_ok=True)


def by_transformers(directory):
    """Named and unnamed special tokens, added ones that are not special, padding and truncation switched on."""
    from transformers import PreTrainedTokenizerFast

    raw = raw_tokenizer()
    raw.add_special_tokens(["<|bos|>"])
    raw.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", raw.token_to_id("<|bos|>"))]
    )
    raw.enable_truncation(5)
    raw.enable_padding(length=50, pad_token="<|endoftext|>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|bos|>",
        eos_token=AddedToken("<|im_end|>", rstrip=True, special=True),
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens(["<think>", AddedToken("</think>", lstrip=True)])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)


def by_qwen_s_class(directory):
    from transformers.models.qwen2 import Qwen2Tokenizer

    raw = json.loads(raw_tokenizer().to_str())["model"]
    merges = [tuple(merge) for merge in raw["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=raw["vocab"], merges=merges, eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = "{%- for m in messages %}{{ m.content + eos_token }}{%- endfor %}"
    tokenizer.save_pretrained(directory)


def template_in_the_config(directory):
    by_transformers(directory)
    (directory / "chat_template.jinja").unlink()
    edit_config(directory, chat_template=TEMPLATE)


def templates_by_name(directory):
    by_transformers(directory)
    (directory / "chat_template.jinja").unlink()
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]
    edit_config(directory, chat_template=templates)


def by_transformers_4(directory):
    """Tokens as objects, and the unnamed special ones under their old name."""
    by_transformers(directory)
    raw = RawTokenizer.from_file(str(directory / "tokenizer.json"))
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    tokens = {
        index: {field: getattr(token, field) for field in fields}
        for index, token in raw.get_added_tokens_decoder().items()
    }
    edit_config(
        directory,
        added_tokens_decoder={str(index): token for index, token in tokens.items()},
        bos_token=next(token | {"__type": "AddedToken"} for token in tokens.values() if token["content"] == "<|bos|>"),
        additional_special_tokens=["<|im_start|>"],
        extra_special_tokens="gone",
        tokenizer_class="PreTrainedTokenizerFast",
    )


def marked_in_the_config_alone(directory):
    """tokenizer.json knows no special token: one is a plain entry of the vocabulary, the others are not there."""
    raw = raw_tokenizer()
    raw.add_tokens(["<|im_end|>"])
    raw.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "extra_special_tokens": ["<|mark|>"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(directory / "tokenizer_config.json", config)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def marked_under_the_old_name(directory):
    marked_in_the_config_alone(directory)
    edit_config(directory, extra_special_tokens="gone", additional_special_tokens=["<|mark|>"])


def marked_by_names_of_their_own(directory):
    marked_in_the_config_alone(directory)
    edit_config(directory, extra_special_tokens={"mark": "<|mark|>"})
    (directory / "chat_template.jinja").write_text("{{ mark + messages[0].content }}", encoding="utf-8")


def tokens_listed_in_the_config(directory):
    """All tokens that were added, though tokenizer.json lacks two of them."""
    marked_in_the_config_alone(directory)
    flags = dict(lstrip=False, normalized=False, rstrip=False, single_word=False)
    listed = {"302": ("<think>", False), "301": ("<|mark|>", True), "300": ("<|im_end|>", True)}
    tokens = {index: {"content": text, "special": special} | flags for index, (text, special) in listed.items()}
    edit_config(directory, added_tokens_decoder=tokens)


def tokens_in_files_of_their_own(directory):
    """As transformers once wrote: added tokens in one file, the names of the special ones in another."""
    marked_in_the_config_alone(directory)
    edit_config(directory, eos_token="gone", bos_token="gone", extra_special_tokens=["<|im_start|>"])
    write_json(directory / "added_tokens.json", {"<think>": 302, "<|mark|>": 301})
    flags = dict(lstrip=False, normalized=False, rstrip=False, single_word=False)
    named = {"eos_token": {"content": "<|im_end|>"} | flags, "bos_token": "<|bos|>"}
    write_json(directory / "special_tokens_map.json", named | {"extra_special_tokens": ["<|mark|>"]})


WRITERS = [
    pocket,
    by_transformers,
    by_qwen_s_class,
    template_in_the_config,
    templates_by_name,
    by_transformers_4,
    marked_in_the_config_alone,
    marked_under_the_old_name,
    marked_by_names_of_their_own,
    tokens_listed_in_the_config,
    tokens_in_files_of_their_own,
]


@pytest.fixture(scope="module", params=WRITERS, ids=lambda writer: writer.__name__)
def both(request, tmp_path_factory):
    """(ours, transformers') of the same directory."""
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp(request.param.__name__)
    request.param(directory)
    return Tokenizer(directory), AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_text_becomes_the_same_ids(both, text):
    ours, theirs = both
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_gets_the_special_tokens_that_the_file_puts_around_a_text(both, text):
    ours, theirs = both
    assert ours.encode_prompt(text) == theirs.encode(text)


AROUND = [  # (post-processor, what it puts before a text, and after it)
    (processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 2045)]), [2045], []),
    (processors.BertProcessing(("<|im_end|>", 2047), ("<|endoftext|>", 2045)), [2045], [2047]),
]


@pytest.mark.parametrize(("processor", "before", "after"), AROUND)
def test_a_post_processor_is_for_prompts_of_text_alone(tmp_path, processor, before, after):
    pocket(tmp_path)
    raw = RawTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processor])
    raw.save(str(tmp_path / "tokenizer.json"))
    ours, plain = Tokenizer(tmp_path), Tokenizer(POCKET_DIR)
    ids = plain.encode(TEXTS[0])
    assert ours.encode_prompt(TEXTS[0]) == [*before, *ids, *after]
    assert ours.encode_chat(CHATS[0]) == plain.encode_chat(CHATS[0]), "a template writes its own"
    assert ours.encode(TEXTS[0]) == ids, "a text within something else gets none"
    assert LLM.for_engine(None, ours).encode(TEXTS[0]) == [*before, *ids, *after]
    assert LLM.for_engine(None, ours).encode(ids) == ids, "ids are taken as they are"


@pytest.mark.parametrize("skip", [False, True])
def test_ids_become_the_same_text(both, skip):
    ours, theirs = both
    for ids in [*map(ours.encode, TEXTS), list(range(len(theirs)))]:
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_the_same_tokens_are_special(both):
    ours, theirs = both
    assert ours.special_ids == set(theirs.all_special_ids)


def test_every_token_s_bytes_are_what_it_decodes_to(both):
    ours, theirs = both
    rows = len(theirs)
    assert ours.token_bytes[rows:] == [b""] * (len(ours.token_bytes) - rows), "the model's spare rows mean nothing"
    for index in range(rows):
        assert ours.token_bytes[index].decode("utf-8", "replace") == theirs.decode([index]), f"token {index}"


@pytest.mark.parametrize("chat", CHATS, ids=["one question", "a conversation"])
def test_a_conversation_becomes_the_same_ids(both, chat):
    ours, theirs = both
    wanted = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(chat) == wanted


# What is refused.


@pytest.fixture
def directory(tmp_path):
    by_transformers(tmp_path)
    return tmp_path


def is_refused(values, call, *arguments):
    with refused(UserError, values):
        call(*arguments)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path):
    is_refused("tokenizer.json", Tokenizer, tmp_path)


def test_a_file_that_is_no_tokenizer_is_refused(directory):
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    is_refused("tokenizer.json", Tokenizer, directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_byte_order_mark_as_powershell_writes_it_is_refused(directory, name):
    (directory / name).write_bytes(codecs.BOM_UTF8 + (directory / name).read_bytes())
    is_refused(name, Tokenizer, directory)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": {}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": {"content": 5}}}),
        ("added_tokens.json", {"<think>": "x"}),
        ("added_tokens.json", {"<think>": None}),
    ],
)
def test_added_tokens_that_cannot_be_read_are_refused(directory, name, content):
    write_json(directory / name, content)
    is_refused(str(directory), Tokenizer, directory)


def test_pieces_with_a_token_for_each_byte_give_text_as_they_arrive(tmp_path):
    """Llama 2's and Mistral's vocabularies: spaces are "▁", and what no piece has comes as tokens of single bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abé", "▁a", "▁ab"]
    merges = [("▁", "a"), ("▁a", "b")]
    raw = RawTokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    raw.add_special_tokens(words[:3])
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for text in ("ab é a", "日b", "a 😀"):
        token_ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
        deltas = [*map(detokenizer.push, token_ids), detokenizer.finish()]
        assert "".join(deltas) == f" {text}" == tokenizer.decode(token_ids)
        assert "\ufffd" not in "".join(deltas), "half a character was shown"
    assert tokenizer.encode("ab 日") == [words.index(word) for word in ("▁ab", "▁", "<0xE6>", "<0x97>", "<0xA5>")]


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path):
    RawTokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    is_refused("byte-level", Tokenizer, tmp_path)


def test_half_a_character_is_refused(directory):
    is_refused("", Tokenizer(directory).encode, "a\ud800")
    is_refused("", Tokenizer(directory).encode_chat, [{"role": "user", "content": "a\ud800"}])


def test_a_checkpoint_without_a_chat_template_is_refused_when_it_is_asked_to_chat(directory):
    (directory / "chat_template.jinja").unlink()
    tokenizer = Tokenizer(directory)
    assert tokenizer.encode("text"), "text needs no template"
    is_refused("template", tokenizer.encode_chat, CHATS[0])


def test_a_template_that_is_no_text_is_refused(directory):
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    is_refused("chat_template.jinja", Tokenizer(directory).encode_chat, CHATS[0])


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ("{% for %}", "template"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ dict.mro() }}", "'mro'"),
        ("{{ dict.fromkeys.__globals__.json }}", "unsafe"),
    ],
)
def test_a_template_is_a_stranger_s_program_and_runs_in_a_sandbox(directory, source, values):
    (directory / "chat_template.jinja").write_text(source, encoding="utf-8")
    is_refused(values, Tokenizer(directory).encode_chat, CHATS[0])


@pytest.mark.reference
def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer, turns, done = Tokenizer(POCKET_DIR), 0, threading.Event()

    def encode():
        tokenizer.encode("abcdefghij" * 40_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20, f"{turns} turns: the tokenizer kept Python's lock, and a server answers nothing meanwhile"
