"""A character is a code point, and the vocabulary is a bijection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigpt.errors import UnknownCharacterError
from minigpt.tokenizer import CharTokenizer


def test_the_id_of_a_character_is_its_place_in_the_vocabulary() -> None:
    tokenizer = CharTokenizer("cab")
    assert tokenizer.chars == "cab"
    assert tokenizer.encode("abc") == [1, 2, 0]
    assert tokenizer.decode([0, 1, 2, 2]) == "cabb"


@given(st.text(min_size=1))
def test_any_text_comes_back_from_the_vocabulary_of_its_own_characters(text: str) -> None:
    tokenizer = CharTokenizer(sorted(set(text)))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and set(ids) == set(range(len(tokenizer)))
    assert tokenizer.decode(ids) == text


def test_line_ends_accents_and_emoji_stay_as_they_are_written() -> None:
    text = "\r\n\te\u0301\u00e9\U0001f600\u200d\x00"
    tokenizer = CharTokenizer(sorted(set(text)))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # An e with a combining accent is two characters, the precomposed one is another.
    assert len(tokenizer.encode("e\u0301\u00e9")) == len(set(tokenizer.encode("e\u0301\u00e9"))) == 3


def test_a_list_of_characters_is_as_good_as_a_string() -> None:
    assert CharTokenizer(["b", "a"]).encode("ab") == CharTokenizer("ba").encode("ab") == [1, 0]


def test_no_text_is_no_ids_and_back() -> None:
    assert CharTokenizer("a").encode("") == []
    assert CharTokenizer("a").decode([]) == ""


def test_length_and_membership_are_those_of_the_vocabulary() -> None:
    tokenizer = CharTokenizer("ab")
    assert len(tokenizer) == 2
    assert "a" in tokenizer and "c" not in tokenizer and "ab" not in tokenizer


def test_unknown_characters_are_named_with_all_their_places() -> None:
    with pytest.raises(UnknownCharacterError, match=r"'x' at 1, '\\n' at 3, 'x' at 4") as caught:
        CharTokenizer("ab").encode("axb\nx")
    assert caught.value.places == [(1, "x"), (3, "\n"), (4, "x")]
    assert CharTokenizer("ab").unknown("axb\nx") == caught.value.places


def test_many_unknown_characters_are_counted_instead_of_listed() -> None:
    with pytest.raises(UnknownCharacterError, match="'x' at 7 and 92 more") as caught:
        CharTokenizer("ab").encode("x" * 100)
    assert len(caught.value.places) == 100


def test_a_text_of_known_characters_has_no_unknown_ones() -> None:
    assert CharTokenizer("ab").unknown("abba") == []


def test_an_id_past_the_vocabulary_is_an_error() -> None:
    with pytest.raises(IndexError):
        CharTokenizer("ab").decode([0, 2])


@pytest.mark.parametrize("chars", ["", [], ["ab"], ["a", ""], "aba", ["a", "a"]])
def test_a_vocabulary_is_single_characters_each_once(chars: str | list[str]) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        CharTokenizer(chars)


def test_a_negative_id_is_no_character_from_the_end() -> None:
    with pytest.raises(IndexError):
        CharTokenizer("abc").decode([0, -1])
