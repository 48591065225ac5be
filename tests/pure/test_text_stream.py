"""Generated ids to text: characters and stop strings spread over tokens (B31)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overspill.errors import UserError
from overspill.text import TextStream


@dataclass(frozen=True)
class Listed:
    """A tokenizer whose token i has the bytes `pieces[i]`; those in `hidden` are control tokens."""

    pieces: tuple[bytes, ...]
    hidden: frozenset[int] = frozenset()

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        return self.pieces[token_id] if special or token_id not in self.hidden else b""


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    """What each push handed out and the rest at the end, and what stopped."""
    stream = TextStream(Listed(tuple(pieces)), stop)
    texts = [stream.push(i) for i in range(len(pieces))]
    return [*texts, stream.finish()], stream.stopped_by


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, read character by character."""
    for end in range(1, len(text) + 1):
        ending = [word for word in stop if text[:end].endswith(word)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted({c % (len(data) + 1) for c in cuts}), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


EMOJI = "\N{GRINNING FACE}".encode()


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        ([EMOJI[:2], EMOJI[2:]], ["", "\N{GRINNING FACE}", ""]),
        ([EMOJI[:1], EMOJI[1:2], EMOJI[2:3], EMOJI[3:]], ["", "", "", "\N{GRINNING FACE}", ""]),
        ([b"a" + EMOJI[:2]], ["a", "\ufffd"]),
        ([b"a", EMOJI[:3]], ["a", "", "\ufffd"]),
        ([EMOJI[:2], b"b"], ["", "\ufffdb", ""]),
        ([b"\xed\xa0\x80"], ["\ufffd\ufffd\ufffd", ""]),
        ([b"\xf0\x80\x80\x41"], ["\ufffd\ufffd\ufffdA", ""]),
        ([b"\x80"], ["\ufffd", ""]),
        ([b"\xff", b"\xfe"], ["\ufffd", "\ufffd", ""]),
        ([b"e", "\N{COMBINING ACUTE ACCENT}".encode()], ["e", "\N{COMBINING ACUTE ACCENT}", ""]),
        ([b"", b"x", b""], ["", "x", "", ""]),
        ([], [""]),
    ],
)
def test_characters_spread_over_tokens(pieces, texts):
    assert run(pieces) == (texts, None)
    assert "".join(texts) == b"".join(pieces).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("pieces", "stop", "texts", "stopped_by"),
    [
        (["ab", "STOP", "cd"], ("STOP",), ["ab", "", "", ""], "STOP"),
        (["abS", "TO", "Pcd"], ("STOP",), ["ab", "", "", ""], "STOP"),
        (["abST", "x"], ("STOP",), ["ab", "STx", ""], None),
        (["abSSTO", "P"], ("STOP",), ["abS", "", ""], "STOP"),
        (["ab", "ST"], ("STOP",), ["ab", "", "ST"], None),
        (["one\n", "\ntwo"], ("\n\n",), ["one", "", ""], "\n\n"),
        (["abcd"], ("abcd", "bc"), ["a", ""], "bc"),
        (["a", "b", "c", "d"], ("abcd", "bc"), ["", "", "a", "", ""], "bc"),
        (["xyz"], ("z", "yz"), ["x", ""], "yz"),
        (["aXbY"], ("Y", "X"), ["a", ""], "X"),
        (["aaab"], ("aab",), ["a", ""], "aab"),
        (["aa", "ab"], ("aab",), ["", "a", ""], "aab"),
    ],
)
def test_stop_strings_spread_over_tokens(pieces, stop, texts, stopped_by):
    assert run([piece.encode() for piece in pieces], stop) == (texts, stopped_by)


def test_a_stop_string_of_one_emoji_spread_over_tokens():
    assert run([b"hi " + EMOJI[:2], EMOJI[2:] + b"more"], ("\N{GRINNING FACE}",)) == (
        ["hi ", "", ""],
        "\N{GRINNING FACE}",
    )


def test_an_unfinished_character_can_complete_a_stop_string_only_at_the_end():
    assert run([b"a" + EMOJI[:2]], ("\ufffd",)) == (["a", ""], "\ufffd")


def test_nothing_comes_after_a_stop_string():
    stream = TextStream(Listed((b"a.", b"b" + EMOJI[:2])), (".",))
    assert [stream.push(0), stream.push(1), stream.finish(), stream.push(0)] == ["a", "", "", ""]
    assert stream.stopped_by == "."


def test_control_tokens_are_shown_only_where_asked_for():
    tokenizer = Listed((b"<|x|>", b"a"), hidden=frozenset({0}))
    assert TextStream(tokenizer).push(0) == ""
    assert TextStream(tokenizer, shown_ids={0}).push(0) == "<|x|>"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UserError, match="stop holds an empty string"):
        TextStream(Listed(()), ("a", ""))


@settings(deadline=None, max_examples=500)
@given(st.text("ab.é💡", max_size=16), st.lists(st.integers(0, 64), max_size=8))
@example("💡", [1, 2, 3])
def test_valid_text_never_shows_a_replacement_character(text, cuts):
    texts, _ = run(pieces_of(text.encode(), cuts))
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)


@settings(deadline=None, max_examples=500)
@given(
    st.binary(max_size=24) | st.text("abcé💡", max_size=12).map(str.encode),
    st.lists(st.integers(0, 64), max_size=10),
    st.lists(st.text("abcé💡\ufffd", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_the_stream_joined_is_the_whole_text_cut_at_the_first_stop(data, cuts, stop):
    texts, stopped_by = run(pieces_of(data, cuts), stop)
    assert ("".join(texts), stopped_by) == cut(data.decode("utf-8", "replace"), stop)


@settings(deadline=None, max_examples=200)
@given(st.text("abcd", max_size=16), st.lists(st.text("abcd", min_size=1, max_size=4), max_size=3).map(tuple))
def test_what_is_held_back_could_become_a_stop_string(text, stop):
    stream = TextStream(Listed(tuple(c.encode() for c in text)), stop)
    shown = ""
    for i in range(len(text)):
        shown += stream.push(i)
        held = text[len(shown) : i + 1]
        if stream.stopped_by is None:
            assert not held or any(word.startswith(held) and word != held for word in stop)
