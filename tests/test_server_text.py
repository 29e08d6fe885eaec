"""Tokens become text as they come: whole characters only, and nothing of a stop string."""

import itertools

import pytest
from tiny_targets import write_tokenizer

from specfit.targets.text import TargetText
from specfit_serve.server.text import MAX_WINDOW, REPLACEMENT, Detokenizer, StopStrings

TEXTS = [
    "",
    "plain",
    "naïve Straße — 東京 😀👩‍👩‍👧 שלום",
    "😀" * 20,
    "é" + "日本語" * 15 + "\n",
    f"a real {REPLACEMENT} is text, too{REPLACEMENT}",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return TargetText(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def by_bytes(tokens):
    """A decoder whose tokens are bytes."""
    return bytes(tokens).decode(errors="replace")


def by_byte_fallback(tokens):
    """Llama's: a run of bytes that is not whole becomes a U+FFFD a byte."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(tokens)


@pytest.mark.parametrize("decode", [by_bytes, by_byte_fallback])
@pytest.mark.parametrize("said", TEXTS)
@pytest.mark.parametrize("context", ["", "Answer: ", "→"])
def test_what_is_shown_is_a_beginning_of_the_text_and_all_of_it_in_the_end(decode, said, context):
    detokenizer, shown = Detokenizer(decode, list(context.encode())), ""
    for byte in said.encode():
        shown += detokenizer.push(byte)
        assert said.startswith(shown)
    assert shown + detokenizer.flush() == said


def test_a_character_is_shown_with_the_byte_that_completes_it():
    detokenizer = Detokenizer(by_bytes, [])
    assert [detokenizer.push(b) for b in "a€b".encode()] == ["a", "", "", "€", "b"]


@pytest.mark.parametrize("data", list(itertools.product([0x41, 0xC3, 0xA9, 0xE2, 0xFF], repeat=4)))
def test_bytes_that_are_no_characters_come_out_as_they_do_together(data):
    detokenizer = Detokenizer(by_bytes, [])
    shown = "".join(map(detokenizer.push, data))
    assert shown + detokenizer.flush() == by_bytes(data)


def test_a_prompt_that_ends_inside_a_character_is_no_context():
    detokenizer = Detokenizer(by_bytes, [0x41, 0xE2])
    assert [detokenizer.push(b) for b in b"ok"] == ["o", "k"]


def test_long_answers_are_decoded_a_window_at_a_time():
    lengths = []

    def decode(tokens):
        lengths.append(len(tokens))
        return by_bytes(tokens)

    detokenizer = Detokenizer(decode, [])
    assert "".join(detokenizer.push(b) for b in b"x" * 500) == "x" * 500
    assert max(lengths) <= MAX_WINDOW + 1


def test_a_word_after_the_prompt_keeps_its_space():
    words = [" The", " capital", " is", " Paris"]

    # As sentencepiece's decoders do, the first space of a text is dropped.
    def decode(tokens):
        return "".join(words[i] for i in tokens).removeprefix(" ")

    detokenizer = Detokenizer(decode, [0, 1])
    assert [detokenizer.push(i) for i in (2, 3)] == [" is", " Paris"]


@pytest.mark.parametrize("said", TEXTS)
def test_a_real_tokenizers_text_is_that_of_all_tokens(text, said):
    tokens = text.encode(said)
    detokenizer = Detokenizer(text.decode, [])
    shown = "".join(map(detokenizer.push, tokens))
    assert shown + detokenizer.flush() == said == text.decode(tokens)


def test_every_token_has_its_bytes(text):
    for said in TEXTS:
        pieces = [text.piece(token) for token in text.encode(said)]
        assert b"".join(data for _, data in pieces) == said.encode()
        assert all(shown == data.decode(errors="replace") for shown, data in pieces)
    assert text.piece(0) == ("<|im_start|>", b"<|im_start|>")
    assert text.piece(10**6) == ("", b"")
    assert text.decode([0, 10**6]) == ""


ALPHABET = "ab"
STOPS = [("ab",), ("aab",), ("abab", "b"), ("aa", "ab"), ("bbb",), ()]


@pytest.mark.parametrize("stops", STOPS)
def test_text_goes_through_up_to_the_first_stop_however_it_is_cut(stops):
    for said in map("".join, itertools.product(ALPHABET, repeat=6)):
        # One character at a time, the first stop to be whole ends the text.
        ends = [(said.find(s) + len(s), s) for s in stops if s in said]
        for size in (1, 2, 3):
            found, shown = StopStrings(stops), ""
            for i in range(0, len(said), size):
                shown += found.push(said[i : i + size])
                assert not any(s in shown for s in stops)
                if found.found is not None:
                    break
            if not ends:
                assert found.found is None
                assert shown + found.flush() == said
            elif size == 1:
                end = min(ends)[0]
                whole = [s for e, s in ends if e == end]
                assert found.found in whole
                assert shown == said[: end - max(map(len, whole))]
                assert said.startswith(shown + found.found)
            else:
                assert said.startswith(shown + (found.found or ""))


def test_what_may_become_a_stop_is_held_back_and_no_more():
    stop = StopStrings(["\n\nUser:"])
    given = ["one\n", "\n", "Us", "ual\n\n", "User", ": two"]
    assert [stop.push(text) for text in given] == ["one", "", "", "\n\nUsual", "", ""]
    assert stop.found == "\n\nUser:"
