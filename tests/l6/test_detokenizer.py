"""Lesson 6. Streamed text: never half a character, and in the end the same as decoding at once."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

from mini_engine.text.detokenizer import Detokenizer
from mini_engine.text.tokenizer import Tokenizer, byte_of_character, bytes_of_token

CORPUS = [
    "Plain text, and a line\nthen another.\n\n\tTabs too.",
    "The capital of France is Paris. 1, 2, 3.",
    "漢字とかな、한국어, 中文字符。",
    "naïve café — coöperate Ångström",
    "e\u0301 o\u0308 a\u030a n\u0303: combining marks, one by one",
    "👩‍👩‍👧‍👦 a family, 🏳️‍🌈 a flag, 👍🏽 a thumb, 🇫🇷 two letters",
    "मनीष, สวัสดี, שלום, مرحبا",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 beyond the basic plane 𐍈",
    "a real \ufffd in the text, and at the end \ufffd",
    "",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A byte-level BPE with 300 entries: nearly every character beyond ASCII is split over several tokens."""
    from transformers import AutoTokenizer

    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    directory = tmp_path_factory.mktemp("bpe")
    raw.save(str(directory / "tokenizer.json"))
    AutoTokenizer.from_pretrained(directory).save_pretrained(directory)
    return Tokenizer(directory)


@pytest.fixture(params=["pocket", "trained"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def stream(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
    return [detokenizer.push(token) for token in ids], detokenizer.finish()


@pytest.mark.parametrize("text", CORPUS)
def test_deltas_are_the_text_for_every_prefix_of_the_answer(tokenizer, text):
    ids = tokenizer.encode(text)
    for length in range(len(ids) + 1):
        deltas, rest = stream(tokenizer, ids[:length])
        assert "".join(deltas) + rest == tokenizer.decode(ids[:length]), f"after {length} tokens of {text!r}"


@pytest.mark.parametrize("text", CORPUS)
def test_no_delta_shows_half_a_character(tokenizer, text):
    deltas, rest = stream(tokenizer, tokenizer.encode(text))
    assert rest == "", "the text is complete, so nothing may be left over"
    for shown in accumulate(deltas):
        assert text.startswith(shown), f"half a character was shown: {deltas}"
    assert "".join(deltas) == text


@given(data=st.data())
def test_any_tokens_give_the_full_decode(pocket, data):
    ids = data.draw(st.lists(st.integers(0, len(pocket.token_bytes) - 1), max_size=40))
    deltas, rest = stream(pocket, ids)
    assert "".join(deltas) + rest == pocket.decode(ids)


@given(data=st.data())
def test_any_bytes_give_the_full_decode(trained, data):
    by_bytes = {value: index for index, value in enumerate(trained.token_bytes) if len(value) == 1}
    ids = [by_bytes[bytes([b])] for b in data.draw(st.binary(max_size=24))]
    deltas, rest = stream(trained, ids)
    assert "".join(deltas) + rest == trained.decode(ids), (
        "invalid bytes must become as many U+FFFD as when decoded at once"
    )


@pytest.mark.parametrize("text", CORPUS)
def test_text_comes_no_later_than_from_the_tokenizers_library(tokenizer, text):
    ids, theirs = tokenizer.encode(text), DecodeStream(skip_special_tokens=True)
    ours = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
    shown_ours = shown_theirs = ""
    for token in ids:
        shown_ours += ours.push(token)
        shown_theirs += theirs.step(tokenizer.backend, token) or ""
        assert shown_ours.startswith(shown_theirs), f"{shown_ours!r} is behind {shown_theirs!r}"
    assert shown_ours == text


@pytest.mark.parametrize("text", ["\ufffd", "a \ufffd b", "the end \ufffd", "\ufffd\ufffd", "😀\ufffd😀"])
def test_a_real_replacement_character_is_shown_as_soon_as_its_bytes_are_there(tokenizer, text):
    deltas, rest = stream(tokenizer, tokenizer.encode(text))
    assert "".join(deltas) == text and rest == "", f"{deltas}, {rest!r}: EF BF BD is a character like any other"


@pytest.mark.parametrize("beyond", [0, 64, 2**20])
def test_an_id_that_the_tokenizer_lacks_has_no_text(pocket, beyond):
    ids = [*pocket.encode("Yes"), len(pocket.token_bytes) + beyond, *pocket.encode(".")]
    deltas, rest = stream(pocket, ids)
    assert ("".join(deltas) + rest, pocket.text_of(ids), pocket.decode(ids)) == ("Yes.", "Yes.", "Yes."), (
        "Qwen3's embedding has more rows than the tokenizer has tokens, and any of them may be drawn"
    )


def test_special_tokens_are_not_shown(pocket):
    end = pocket.backend.token_to_id("<|im_end|>")
    deltas, rest = stream(pocket, [*pocket.encode("Yes."), end])
    assert "".join(deltas) + rest == "Yes."


class Counted(list):
    """Counts how often an entry is looked up."""

    looked_up = 0

    def __getitem__(self, index):
        self.looked_up += 1
        return super().__getitem__(index)


@pytest.mark.task(1)
def test_every_byte_has_one_character():
    table = byte_of_character()
    assert sorted(table.values()) == list(range(256)), "256 stand-ins, one for each byte"
    paris, why = bytes_of_token("ĠParis"), "Ġ is how tokenizer.json spells the byte 20, a space; P stands for itself"
    if paris == "ĠParis".encode():
        why = "the token's spelling was taken for its text: Ġ stands for the byte 20, a space"
    assert paris == b" Paris", why
    assert bytes_of_token("Ċ") == b"\n", "Ċ is how tokenizer.json spells a line break"
    spelled = "".join(table)
    assert bytes_of_token(spelled) == bytes(table.values()), "each stand-in is one byte, in the order of the token"


@pytest.mark.task(1)
def test_a_token_may_be_part_of_a_character():
    assert bytes_of_token("ð") == b"\xf0", "ð stands for byte F0, the first of an emoji: one byte, not ð's UTF-8"


@pytest.mark.task(1)
def test_an_empty_token_has_no_bytes():
    assert bytes_of_token("") == b"", "no character, no byte"


@pytest.mark.task(1)
def test_a_token_of_plain_text_is_its_own_bytes():
    assert bytes_of_token("漢") == "漢".encode(), "漢 stands for no byte, so the token is plain text"


@pytest.mark.task(1)
def test_one_character_of_plain_text_makes_the_whole_token_plain_text():
    assert bytes_of_token("é漢") == "é漢".encode(), "é could stand for byte E9, but beside 漢 it is an é: C3 A9"


# Four tokens: two that begin an emoji, its last byte with a character after it, and plain text.
SMILE = [b"\xf0\x9f", b"\x98", b"\x80!", b"ok"]


@pytest.mark.task(2)
def test_push_holds_back_the_bytes_of_an_unfinished_character():
    detokenizer = Detokenizer(SMILE)
    shown = [detokenizer.push(token) for token in (3, 0, 1, 2)]
    why = "hold the bytes back until the character is complete, then show it with what follows"
    if shown == [SMILE[token].decode(errors="replace") for token in (3, 0, 1, 2)]:
        why = f"each token was decoded alone: {why}"
    assert shown == ["ok", "", "", "😀!"], why


@pytest.mark.task(2)
def test_push_shows_nothing_of_a_hidden_token():
    assert Detokenizer(SMILE, hidden_ids={3}).push(3) == "", "an end mark is meant for the engine, not for the reader"


@pytest.mark.task(2)
def test_a_hidden_token_inside_a_character_changes_nothing():
    detokenizer = Detokenizer(SMILE, hidden_ids={3})
    assert [detokenizer.push(token) for token in (0, 3, 1, 3, 2)] == ["", "", "", "", "😀!"], (
        "a hidden token between the tokens of a character: the bytes before it still wait for theirs"
    )


@pytest.mark.task(2)
def test_token_0_can_be_shown_and_hidden():
    assert Detokenizer([b"a", b"b"], hidden_ids={1}).push(0) == "a", "token 0 is a token like any other"
    assert Detokenizer([b"a", b"b"], hidden_ids={0}).push(0) == "", "token 0 may be hidden like any other"


@pytest.mark.task(2)
def test_bytes_that_cannot_become_a_character_are_shown_as_u_fffd():
    detokenizer = Detokenizer([b"\xff", b"\xf0\x9f", b"A"])
    assert [detokenizer.push(token) for token in (0, 1, 2)] == ["\ufffd", "", "\ufffdA"], (
        "FF begins no character; F0 9F begins one that A does not continue. Decoding at once gives U+FFFD for each"
    )


@pytest.mark.task(2)
def test_a_token_costs_the_bytes_it_has_and_no_more():
    """The cost of a token does not depend on the answer's length: an entry or two are looked up for each."""
    table = Counted([b"one ", b"\xf0\x9f\x98", b"\x80"])
    detokenizer, ids = Detokenizer(table), [0, 1, 2] * 100 + [1]
    for token in ids:
        detokenizer.push(token)
    most = 3 * len(ids)  # looking twice at the same entry does no harm
    assert table.looked_up <= most, f"{table.looked_up} lookups for {len(ids)} tokens: old tokens are decoded again"
    held = detokenizer.decoder.getstate()[0]
    assert len(held) <= 3, "at most three bytes of an unfinished character are held back"


def holding(tokens):
    """Return a detokenizer that has taken these tokens of SMILE."""
    detokenizer = Detokenizer(SMILE)
    try:
        for token in tokens:
            detokenizer.push(token)
    except NotImplementedError:  # `finish` is tested before `push` is written
        detokenizer.decoder.decode(b"".join(SMILE[token] for token in tokens))
    return detokenizer


@pytest.mark.task(3)
@pytest.mark.parametrize("tokens", [(0,), (0, 1), (3, 0)])
def test_finish_shows_what_never_became_a_character(tokens):
    held = b"".join(SMILE[token] for token in tokens)
    why = f"the answer breaks off after the bytes {held!r}: its unfinished character is shown as one U+FFFD"
    try:
        left = holding(tokens).finish()
    except UnicodeDecodeError as error:
        error.add_note(why)
        raise
    assert left == "\ufffd", why if left else f"the last bytes are lost; {why}"


@pytest.mark.task(3)
def test_finish_shows_nothing_when_no_bytes_are_left():
    assert holding(()).finish() == "", "nothing came, so nothing is left"
    assert holding((3, 0, 1, 2)).finish() == "", "every byte has become a character, so nothing is left"


@pytest.mark.task(3)
def test_finish_shows_what_is_left_only_once():
    detokenizer = holding((0,))
    assert [detokenizer.finish(), detokenizer.finish()] == ["\ufffd", ""], "the answer ends once"
