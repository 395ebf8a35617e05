"""Text comes out of tokens in pieces that make the whole, and no piece holds half a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_fallback_tokenizer, byte_tokenizer

from paged_kv.engine.detokenizer import Detokenizer, TextStream

TOKENIZER = byte_tokenizer()


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)))
def test_pieces_make_the_whole(data):
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in data]
    assert "".join(pieces) + detokenizer.flush() == data.decode(errors="replace")


@pytest.mark.parametrize("tokenizer", [TOKENIZER, byte_fallback_tokenizer()], ids=["bytes", "byte-fallback"])
@pytest.mark.parametrize("text", ["a", "é", "漢", "🙂"])
def test_a_character_comes_with_its_last_byte(text, tokenizer):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in (text + text).encode()]
    nothing = [""] * (len(text.encode()) - 1)
    assert pieces == [*nothing, text, *nothing, text]


def test_bytes_that_are_no_text_do_not_hold_back_what_follows():
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in b"\xff\xff\xffab"]
    assert "".join(pieces[:-1]) == "\ufffd\ufffd\ufffda"
    assert pieces[-1] == "b"


STOPS = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@settings(deadline=None, max_examples=300)
@given(st.text("abé", max_size=20), STOPS)
def test_text_ends_where_the_first_stop_text_begins_and_never_tells_too_much(text, stop):
    stream, told = TextStream(TOKENIZER, stop), ""
    data = text.encode()
    for i, token in enumerate(data):
        stopped = stream.push(token)
        assert stream.text.startswith(told)
        told = stream.text
        so_far = data[: i + 1].decode(errors="ignore")
        assert stopped == any(s in so_far for s in stop)
        if stopped:
            assert told == so_far[: min(so_far.find(s) for s in stop if s in so_far)]
            return
    stream.close()
    assert stream.text == text


def test_a_stop_text_is_ignored_while_it_may_not_stop():
    stream = TextStream(TOKENIZER, ("ab",))
    assert [stream.push(token, may_stop=i > 2) for i, token in enumerate(b"abcab")] == [False] * 4 + [True]
    assert stream.text == "abc"
