"""Text in pieces against text in one go, and where stop strings end it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lookahead_decoding.text import IncrementalDetokenizer, TextStream

CORPUS = "the then there 🙂🙃 🙂🙄 👩🏽‍🚀 naïve नमस्ते é é 你好 你们 안녕 don't a  b\n\n\tc" * 3
SPECIAL = ["<s>", "</s>"]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2's: every byte is a token, and merges end where the bytes of a character do not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@cache
def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Like Llama 2's: spaces are in tokens, the text's first one is dropped, unknown characters are bytes."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁"), ("▁a", "b"), ("好", "a")]
    for token in ["▁", *"abcde.", "好", *(left + right for left, right in merges)]:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def pieces(tokenizer: Any, ids: Sequence[int], **options: bool) -> list[str]:
    """A piece per token, and what was held back at the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
        st.sampled_from(["🙂", "👩🏽‍🚀", "é", "नमस्ते", "你好", "the ", "  ", " ab", "好a", "\n", " don't .", "\ufffd"]),
    ),
    max_size=8,
).map("".join)


@settings(deadline=None, max_examples=200)
@given(text=texts, data=st.data())
@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_the_pieces_of_a_text_add_up_to_decoding_it_at_once(make: Any, text: str, data: st.DataObject) -> None:
    tokenizer = make()
    ids = encode(tokenizer, text)
    for _ in range(data.draw(st.integers(0, 2), "special tokens")):
        ids.insert(data.draw(st.integers(0, len(ids)), "at"), data.draw(st.integers(0, 1), "special token"))
    assert "".join(pieces(tokenizer, ids)) == decode(tokenizer, ids)


@settings(deadline=None, max_examples=200)
@given(text=texts, data=st.data())
def test_the_pieces_add_up_when_the_text_ends_inside_a_character(text: str, data: st.DataObject) -> None:
    tokenizer = byte_level()
    ids = encode(tokenizer, text)
    ids = ids[: data.draw(st.integers(0, len(ids)), "length")]
    assert "".join(pieces(tokenizer, ids)) == decode(tokenizer, ids)


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 319), max_size=20), skip=st.booleans())
def test_the_pieces_of_any_byte_level_tokens_add_up(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    found = "".join(pieces(tokenizer, ids, skip_special_tokens=skip))
    assert found == decode(tokenizer, ids, skip_special_tokens=skip)


def test_some_tokens_of_the_byte_level_tokenizer_are_parts_of_characters() -> None:
    tokenizer = byte_level()
    alone = [decode(tokenizer, [token]) for token in encode(tokenizer, CORPUS + "ü")]
    assert "the" in alone
    assert any(text.startswith("\ufffd") or text.endswith("\ufffd") for text in alone)


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_a_character_appears_whole_with_its_last_byte(make: Any) -> None:
    tokenizer = make()
    ids = encode(tokenizer, "a☃b")
    found = pieces(tokenizer, ids)
    assert [piece for piece in found if piece] == ["a", "☃", "b"]
    assert len(found) == len(ids) + 1 >= 6


def test_special_tokens_are_skipped_or_shown_as_asked() -> None:
    tokenizer = byte_level()
    the, there = encode(tokenizer, "the"), encode(tokenizer, " there")
    ids = [0, *the, 1, *there, 1]
    assert "".join(pieces(tokenizer, ids)) == "the there"
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)) == "<s>the</s> there</s>"


def test_spaces_between_sentencepiece_tokens_are_kept_and_the_first_is_not() -> None:
    tokenizer = sentencepiece_like()
    found = pieces(tokenizer, encode(tokenizer, "ab ab  ab"))
    assert "".join(found) == "ab ab  ab"
    assert found[0] == "ab"


class Counting:
    """A tokenizer that counts how many tokens it decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer, self.num_decoded = tokenizer, 0
        self.all_special_ids = tokenizer.all_special_ids

    def decode(self, tokens: Sequence[int], **options: bool) -> Any:
        self.num_decoded += len(tokens)
        return self.tokenizer.decode(tokens, **options)


@pytest.mark.parametrize(
    "tokens",
    [["the", "Ġthe", "Ġ", "t"], ["ð", "Ł", "Ļ", "Ĥ"], ["<s>"], ["Ĥ"]],
    ids=["words", "emoji", "special-tokens", "stray-bytes"],
)
def test_a_token_costs_no_more_at_the_end_of_a_long_text_than_at_its_beginning(tokens: list[str]) -> None:
    counting = Counting(byte_level())
    ids = byte_level().convert_tokens_to_ids(tokens)
    assert None not in ids
    detokenizer = IncrementalDetokenizer(counting)  # type: ignore[arg-type]
    most = 0
    for token in (ids * 500)[:500]:
        counting.num_decoded = 0
        detokenizer.push(token)
        most = max(most, counting.num_decoded)
    assert most <= 96


class Words:
    """A tokenizer whose tokens are given strings."""

    all_special_ids = ()

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    def decode(self, tokens: Sequence[int], **_: bool) -> str:
        return "".join(self.words[token] for token in tokens)


def stream_of(words: Sequence[str], stops: Sequence[str]) -> TextStream:
    return TextStream(IncrementalDetokenizer(Words(words)), stops)  # type: ignore[arg-type]


def num_held_back(text: str, stops: Sequence[str]) -> int:
    """The longest end of a text that begins a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@settings(deadline=None, max_examples=500)
@given(
    words=st.lists(st.text("abc", max_size=3), min_size=1, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    take_behind=st.sets(st.integers(0, 11)),
)
def test_text_ends_before_the_first_stop_string_and_only_its_beginnings_are_held_back(
    words: list[str], stops: list[str], take_behind: set[int]
) -> None:
    stream = stream_of(words, stops)
    text, shown, num_waiting = "", "", 0
    for token, word in enumerate(words):
        text += word
        num_waiting += 1
        contains_stop = any(text.find(stop) >= 0 for stop in stops)
        assert stream.push(token) == contains_stop
        last = contains_stop or token == len(words) - 1
        if last or token in take_behind:
            taken = stream.take(last=last)
            assert len(taken) == num_waiting
            shown, num_waiting = shown + "".join(taken), 0
        if last:
            end = min((text.find(stop) for stop in stops if stop in text), default=len(text))
            assert shown == text[:end]
            return
        if token in take_behind:
            assert shown == text[: len(text) - num_held_back(text, stops)]


def test_held_back_text_appears_when_it_was_no_stop_string() -> None:
    stream = stream_of(["x", "EN", "D", "IVES"], ["END!"])
    taken = []
    for token in range(4):
        assert not stream.push(token)
        taken.append(stream.take(last=False))
    assert taken == [["x"], [""], [""], ["ENDIVES"]]


def test_what_is_still_held_back_at_the_end_appears() -> None:
    stream = stream_of(["x", "EN"], ["END"])
    for token in range(2):
        stream.push(token)
    assert stream.take(last=True) == ["x", "EN"]


@pytest.mark.parametrize(
    ("words", "stops", "taken"),
    [
        (["a", "ST", "OP"], ["STOP"], ["a", "", ""]),
        (["a", "bSTOPc"], ["STOP"], ["a", "b"]),
        (["a", "b", "\n\nc"], ["c", "\n\n"], ["a", "b", ""]),
        (["xa", "b"], ["xabc", "ab"], ["x", ""]),
        (["STOP"], ["STOP"], [""]),
    ],
    ids=["over-tokens", "inside-a-token", "the-first-of-two", "overlapping", "at-once"],
)
def test_text_ends_before_a_stop_string(words: list[str], stops: list[str], taken: list[str]) -> None:
    stream = stream_of(words, stops)
    assert [stream.push(token) for token in range(len(words))] == [False] * (len(words) - 1) + [True]
    assert stream.take(last=True) == taken


def test_a_stop_string_of_several_bytes_ends_the_text_with_its_last_byte() -> None:
    tokenizer = byte_level()
    ids = encode(tokenizer, "the ☃ there")
    stream = TextStream(IncrementalDetokenizer(tokenizer), ["☃"])
    found = [stream.push(token) for token in ids]
    at = found.index(True)
    assert decode(tokenizer, ids[: at + 1]) == "the ☃"
    assert "".join(stream.take(last=True)) == "the "


def test_bytes_that_never_became_a_character_end_the_text() -> None:
    tokenizer = byte_level()
    ids = encode(tokenizer, "the ☃")[:-1]
    stream = TextStream(IncrementalDetokenizer(tokenizer))
    for token in ids:
        assert not stream.push(token)
    taken = stream.take(last=True)
    assert len(taken) == len(ids)
    assert "".join(taken) == decode(tokenizer, ids)
    assert taken[-1].endswith("\ufffd")


def test_without_stop_strings_nothing_is_held_back() -> None:
    stream = stream_of(["a", "b", "c"], [])
    stream.push(0)
    assert stream.take(last=False) == ["a"]
    assert stream.take(last=False) == []
    stream.push(1)
    stream.push(2)
    assert stream.take(last=True) == ["b", "c"]
